// A pool of worker threads for the host kernels. Knows nothing of experts.
//
// `threads` counts everything that computes at once, the waiting caller included: threads - 1 workers (one
// at least, so that submitted work proceeds while the caller does something else). With threads == 1 a run()
// stays on the caller and only submit() uses the one worker.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace rapidmoe {

// Cores in this process's affinity mask: the default size of the pool.
int affinity_cores();

class Pool {
 public:
  using Task = std::function<void(int64_t part)>;

  // Parts of one job, handed out one by one. An exception in a part is kept; the other parts still run.
  class Batch {
   public:
    Batch(int64_t parts, Task task) : parts_(parts), task_(std::move(task)), left_(parts) {}

   private:
    friend class Pool;
    void work();  // take parts until none is left
    const int64_t parts_;
    const Task task_;
    std::atomic<int64_t> next_{0}, left_;
    std::mutex mutex_;
    std::condition_variable finished_;
    std::string error_;
  };
  using Ticket = std::shared_ptr<Batch>;

  // The process's pool, made at first use with affinity_cores() threads. Never destroyed: worker threads end
  // with the process.
  static Pool& instance();

  explicit Pool(int threads) { resize(threads); }
  ~Pool() { stop(); }

  // Start over with another number of threads, >= 1. Running batches finish.
  void resize(int threads);
  int threads() const { return threads_; }

  // Start task(0..parts-1) on the workers and return.
  Ticket submit(int64_t parts, Task task);
  // Wait until all parts are done, helping where threads > 1. Throws std::runtime_error with a part's error.
  void wait(const Ticket& ticket);
  // Run all parts now, on the caller and the workers.
  void run(int64_t parts, const Task& task);

 private:
  void stop();
  void loop();

  std::atomic<int> threads_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> submitted_{0};
  std::atomic<bool> stopping_{false};
  std::deque<Ticket> queue_;
  std::vector<std::thread> workers_;
  std::mutex resize_mutex_;
};

}  // namespace rapidmoe
