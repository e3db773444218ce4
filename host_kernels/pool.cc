#include "pool.h"

#include <sched.h>

#include <chrono>
#include <stdexcept>

namespace rapidmoe {
namespace {
// How long an idle thread looks for work before it sleeps: longer than the gap between two kernels of a layer,
// short against a scheduler's time slice.
constexpr auto kSpin = std::chrono::microseconds(20);
}  // namespace

int affinity_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int count = CPU_COUNT(&set);
  return count > 0 ? count : 1;
}

void Pool::Batch::work() {
  for (;;) {
    const int64_t part = next_.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts_) return;
    try {
      task_(part);
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = e.what();
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      finished_.notify_all();
    }
  }
}

Pool& Pool::instance() {
  static Pool* pool = new Pool(affinity_cores());
  return *pool;
}

void Pool::resize(int threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1, got " + std::to_string(threads));
  std::lock_guard<std::mutex> guard(resize_mutex_);
  if (threads == threads_) return;
  stop();
  threads_ = threads;
  stopping_ = false;
  const int workers = threads > 1 ? threads - 1 : 1;
  for (int i = 0; i < workers; ++i) workers_.emplace_back([this] { loop(); });
}

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

void Pool::loop() {
  uint64_t seen = submitted_.load(std::memory_order_acquire);
  for (;;) {
    Ticket batch;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      while (!queue_.empty() && queue_.front()->next_.load(std::memory_order_relaxed) >= queue_.front()->parts_)
        queue_.pop_front();
      if (!queue_.empty()) {
        batch = queue_.front();
      } else {
        if (stopping_) return;
        seen = submitted_.load(std::memory_order_relaxed);
      }
    }
    if (batch) {
      batch->work();
      continue;
    }
    const auto until = std::chrono::steady_clock::now() + kSpin;
    while (submitted_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < until) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return stopping_ || submitted_.load(std::memory_order_relaxed) != seen; });
  }
}

Pool::Ticket Pool::submit(int64_t parts, Task task) {
  Ticket ticket = std::make_shared<Batch>(parts, std::move(task));
  if (parts == 0) return ticket;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(ticket);
    submitted_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  return ticket;
}

void Pool::wait(const Ticket& ticket) {
  Batch& batch = *ticket;
  if (threads_ > 1) batch.work();
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (batch.left_.load(std::memory_order_acquire) > 0 && std::chrono::steady_clock::now() < until) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  std::unique_lock<std::mutex> lock(batch.mutex_);
  batch.finished_.wait(lock, [&] { return batch.left_.load(std::memory_order_acquire) == 0; });
  if (!batch.error_.empty()) throw std::runtime_error(batch.error_);
}

void Pool::run(int64_t parts, const Task& task) {
  if (threads_ == 1 || parts == 1) {
    for (int64_t part = 0; part < parts; ++part) task(part);
    return;
  }
  wait(submit(parts, task));
}

}  // namespace rapidmoe
