#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "topology.h"

namespace rapidmoe {
namespace {

// How long an idle thread looks for work before it sleeps: longer than the gap between two kernels of a layer,
// short against a scheduler's time slice.
constexpr auto kSpin = std::chrono::microseconds(50);

void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Spin until ready() or kSpin has passed; false = it has.
template <class Ready>
bool spin(Ready ready) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  for (;;) {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      relax();
    }
    if (std::chrono::steady_clock::now() >= until) return false;
  }
}

}  // namespace

bool Pool::Batch::work() {
  bool any = false;
  for (;;) {
    const int64_t part = next_.fetch_add(1, std::memory_order_relaxed);
    if (part >= parts_) return any;
    any = true;
    try {
      call_(context_, part);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      done_.store(1);
      if (waiting_.load()) futex_wake(done_);
    }
  }
}

Pool& Pool::instance() {
  static Pool* pool = new Pool(available_cores());
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
  for (int i = 0; i < workers; ++i) workers_.emplace_back([this, i] { loop(i); });
}

void Pool::stop() {
  stopping_ = true;
  submitted_.fetch_add(1);
  futex_wake(submitted_);
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
}

bool Pool::work() {
  bool any = false;
  for (Slot& slot : slots_) {
    if (!slot.batch.load(std::memory_order_relaxed)) continue;
    slot.users.fetch_add(1);
    if (Batch* batch = slot.batch.load()) any |= batch->work();
    slot.users.fetch_sub(1);
  }
  return any;
}

void Pool::loop(int worker) {
  pin_worker(worker);
  for (;;) {
    const uint32_t seen = submitted_.load();
    if (work()) continue;
    if (stopping_) return;
    if (spin([&] { return submitted_.load(std::memory_order_acquire) != seen; })) continue;
    parked_.fetch_add(1);
    futex_wait(submitted_, seen);
    parked_.fetch_sub(1);
  }
}

void Pool::start(Batch& batch, int64_t parts) {
  batch.parts_ = parts;
  batch.next_.store(0, std::memory_order_relaxed);
  batch.left_.store(parts, std::memory_order_relaxed);
  batch.waiting_ = 0, batch.done_ = parts == 0, batch.failed_ = false, batch.error_ = nullptr, batch.slot_ = -1;
  if (parts == 0) return;
  for (int i = 0; i < kSlots; ++i) {
    Batch* none = nullptr;
    if (slots_[i].batch.load(std::memory_order_relaxed) || !slots_[i].batch.compare_exchange_strong(none, &batch))
      continue;
    batch.slot_ = i;
    submitted_.fetch_add(1);
    if (parked_.load() > 0) futex_wake(submitted_);
    return;
  }
  batch.work();  // every slot is taken: the caller does it all
}

void Pool::wait(Batch& batch) {
  if (threads_ > 1) batch.work();
  if (!spin([&] { return batch.done_.load(std::memory_order_acquire) != 0; })) {
    batch.waiting_ = 1;
    while (!batch.done_.load()) futex_wait(batch.done_, 0);
  }
  if (batch.slot_ >= 0) {
    Slot& slot = slots_[batch.slot_];
    slot.batch.store(nullptr);
    while (slot.users.load()) relax();
    batch.slot_ = -1;
  }
  if (batch.failed_) std::rethrow_exception(batch.error_);
}

}  // namespace rapidmoe
