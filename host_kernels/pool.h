// A pool of worker threads for the host kernels. Knows nothing of experts.
//
// `threads` counts everything that computes at once, the waiting caller included: threads - 1 workers (one
// at least, so that submitted work proceeds while the caller does something else). With threads == 1 a run()
// stays on the caller and only submit() uses the one worker. Submitting and waiting allocate nothing and take no lock.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace rapidmoe {

class Pool {
 public:
  // Parts of one piece of work, handed out one by one. Owned by the caller, who must wait() before it goes or is
  // submitted again. An exception in a part is kept; the other parts still run.
  class Batch {
   public:
    Batch() = default;
    Batch(const Batch&) = delete;
    Batch& operator=(const Batch&) = delete;

   private:
    friend class Pool;
    bool work();  // take parts until none is left; false if there was none
    void (*call_)(void*, int64_t) = nullptr;
    void* context_ = nullptr;
    int64_t parts_ = 0;
    int slot_ = -1;
    std::atomic<int64_t> next_{0}, left_{0};
    std::atomic<uint32_t> waiting_{0}, done_{0};
    std::atomic<bool> failed_{false};
    std::exception_ptr error_;
  };

  // The process's pool, made at first use with available_cores() threads. Never destroyed: worker threads end
  // with the process.
  static Pool& instance();

  explicit Pool(int threads) { resize(threads); }
  ~Pool() { stop(); }

  // Start over with another number of threads, >= 1. Running batches finish.
  void resize(int threads);
  int threads() const { return threads_; }

  // Start task(0..parts-1) on the workers and return. `task` must live until wait() returns.
  template <class Task>
  void submit(Batch& batch, int64_t parts, Task& task) {
    batch.call_ = [](void* context, int64_t part) { (*static_cast<Task*>(context))(part); };
    batch.context_ = const_cast<void*>(static_cast<const void*>(&task));
    start(batch, parts);
  }
  // Wait until all parts are done, helping where threads > 1. Rethrows a part's exception.
  void wait(Batch& batch);
  // Run all parts now, on the caller and the workers.
  template <class Task>
  void run(int64_t parts, const Task& task) {
    if (threads_ == 1 || parts == 1) {
      for (int64_t part = 0; part < parts; ++part) task(part);
      return;
    }
    Batch batch;
    submit(batch, parts, task);
    wait(batch);
  }

 private:
  struct alignas(64) Slot {
    std::atomic<Batch*> batch{nullptr};
    std::atomic<int> users{0};  // workers that may still look at the batch
  };
  static constexpr int kSlots = 64;
  void start(Batch& batch, int64_t parts);
  void stop();
  void loop(int worker);
  bool work();

  std::atomic<int> threads_{0};
  Slot slots_[kSlots];
  alignas(64) std::atomic<uint32_t> submitted_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
  std::mutex resize_mutex_;
};

}  // namespace rapidmoe
