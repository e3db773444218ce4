// The residual correction of the critical set. No XLA, no Python.
//
//   h_j      = silu(u0_j + R1_j . x) * (v0_j + R3_j . x)
//   delta[t] = sum over chosen (slot, unit) of weight * (h_j W2_j - h0_j B2_j),   W2 = B2 + R2
#pragma once
#include "routing.h"

namespace rapidmoe {

// One layer's records: [E, F] records of RecordLayout, kRecordAlign apart.
struct RecordLayer {
  const uint8_t* records;
  int64_t experts, units, width;
  int base_bits, residual_bits;
};

// Everything a correction reads. plan() takes copies of what it needs: the arrays may go when it returns.
struct ResidualRequest {
  Step step;
  const float* weights;  // [T, k] routing weights
  const float* u0;       // [T, k, F] base-only values
  const float* v0;
  const float* h0;
  const bool* mask;  // [T, k, F] critical_mask, true = corrected
  RecordLayer layer;
  bool exact;  // float32 throughout; otherwise int8 activations and RowKernels::add_block
};

struct ResidualStats {
  int64_t records;     // records read: each counted once a step
  int64_t unit_tokens; // (token, unit) corrections made from them
};

// One correction: plan(), then part(0 .. parts()-1) in any order on any threads, then finish(). Reusable.
class ResidualJob {
 public:
  // Compact the mask into a list of units with the pairs that chose them; quantise the activations.
  void plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request);
  int64_t parts() const { return units_.empty() ? 0 : sums_.parts(); }
  void part(int64_t p);
  // out [T, D] = y_base + delta.
  ResidualStats finish(Pool& pool, const float* y_base, float* out) const;

  Pool::Ticket ticket;  // of the parts, where they run in the background

 private:
  struct Unit {
    int32_t active, unit;  // active: index into groups_
    int64_t begin, end;    // into chosen_: the pairs that chose it
  };
  struct Choice {
    int32_t position;  // among the pairs of the unit's expert
    float u0, v0, h0;
  };
  const uint8_t* record(const Unit& unit) const;
  // Units first .. last - 1, at most kBlock / 2, all of one expert.
  void block(int64_t first, int64_t last, float* acc) const;

  const RowKernels* rows_ = nullptr;
  RecordLayer layer_ = {};
  bool exact_ = false;
  int64_t tokens_ = 0, slots_ = 0;
  std::vector<float> weights_;  // [pairs]
  Groups groups_;
  Activations activations_;
  std::vector<Unit> units_;
  std::vector<Choice> chosen_;
  PartialSums sums_;
};

}  // namespace rapidmoe
