#include "jobs.h"

#include <stdexcept>
#include <string>

namespace rapidmoe {

Jobs& Jobs::instance() {
  static Jobs* jobs = new Jobs();
  return *jobs;
}

uint32_t Jobs::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (free_.empty()) {
    free_.push_back(uint32_t(slots_.size()));
    slots_.push_back(std::make_unique<Slot>());
  }
  const uint32_t ticket = free_.back();
  free_.pop_back();
  slots_[ticket]->busy = true;
  return ticket;
}

void Jobs::give_back(uint32_t ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  slots_[ticket]->busy = false;
  slots_[ticket]->store.reset();
  free_.push_back(ticket);
}

uint32_t Jobs::start(const RowKernels& rows, Pool& pool, int64_t store, int64_t layer, ResidualRequest request) {
  std::shared_ptr<ResidualStore> found = store_find(store);
  request.layer = found->layer(layer);
  const uint32_t ticket = take();
  Slot* slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    slot = slots_[ticket].get();
  }
  try {
    slot->store = std::move(found);
    slot->job.plan(rows, pool, request);
    pool.submit(slot->job.batch, slot->job.parts(), slot->job);
  } catch (...) {
    give_back(ticket);
    throw;
  }
  return ticket;
}

ResidualStats Jobs::done(Pool& pool, uint32_t ticket, const float* y_base, float* out) {
  Slot* slot = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ticket < slots_.size() && slots_[ticket]->busy) slot = slots_[ticket].get();
  }
  if (!slot) throw std::invalid_argument("residual ticket " + std::to_string(ticket) + " is not in flight");
  struct Return {
    Jobs* jobs;
    uint32_t ticket;
    ~Return() { jobs->give_back(ticket); }
  } guard{this, ticket};
  pool.wait(slot->job.batch);
  return slot->job.finish(pool, y_base, out);
}

int64_t Jobs::in_flight() {
  std::lock_guard<std::mutex> lock(mutex_);
  return int64_t(slots_.size() - free_.size());
}

}  // namespace rapidmoe
