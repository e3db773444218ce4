// Residual corrections in flight: start() hands one to the pool and returns a ticket, done() waits for it.
// No XLA, no Python. Any number may be in flight; job objects and their buffers are reused.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "residual.h"
#include "store.h"

namespace rapidmoe {

class Jobs {
 public:
  static Jobs& instance();

  // request.layer is filled in from the store.
  uint32_t start(const RowKernels& rows, Pool& pool, int64_t store, int64_t layer, ResidualRequest request);
  // out = y_base + delta. Throws what the job threw. A ticket is good for one done().
  ResidualStats done(Pool& pool, uint32_t ticket, const float* y_base, float* out);
  int64_t in_flight();

 private:
  struct Slot {
    ResidualJob job;
    std::shared_ptr<ResidualStore> store;
    bool busy = false;
  };
  uint32_t take();
  void give_back(uint32_t ticket);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<uint32_t> free_;
};

}  // namespace rapidmoe
