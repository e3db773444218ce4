// The residual correction of the critical set. No XLA, no Python.
//
//   h_j      = silu(u0_j + R1_j . x) * (v0_j + R3_j . x)        (or ResidualRequest::limit's form)
//   delta[t] = sum over chosen (slot, unit) of weight * (h_j W2_j - h0_j B2_j),   W2 = B2 + R2
#pragma once
#include "dense.h"

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
  bool exact;     // float32 throughout; otherwise int8 activations, add_block and sum_many of RowKernels
  bool replaces;  // the base leaves out pairs of which every unit is chosen: their delta is weight * h_j W2_j
  float limit;    // 0: h = silu(u) v; else gpt-oss's a sigmoid(1.702 a) (b + 1), a = min(u, limit), b = v in +-limit
};

struct ResidualStats {
  int64_t records;     // records read: each counted once a step
  int64_t unit_tokens; // (token, unit) corrections made from them
};

// One correction: plan(), then operator()(0 .. parts()-1) in any order on any threads, then finish(). Reusable.
class ResidualJob {
 public:
  // Compact the mask into a list of units with the pairs that chose them; quantise the activations.
  void plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request);
  int64_t parts() const { return parts_; }
  void operator()(int64_t part);
  // out [T, D] = y_base + delta.
  ResidualStats finish(Pool& pool, const float* y_base, float* out);

  Pool::Batch batch;  // of the parts, where they run in the background

 private:
  struct Unit {
    int32_t active, unit;  // active: index into groups_
    int64_t begin, end;    // choices: the pairs that chose it
  };
  struct Count {
    int64_t units, choices;
  };
  void scan(const ResidualRequest& request, int64_t active, bool fill);
  const uint8_t* record(const Unit& unit) const;
  int64_t tokens_of(int64_t active) const { return groups_.begin[active + 1] - groups_.begin[active]; }
  const int32_t* pairs_of(int64_t active) const { return groups_.pairs.data() + groups_.begin[active]; }
  // For units first .. last - 1, all of one expert: h of every choice, then its factors of the base's and the residual's
  // row of W2, in place of u0 and v0, or in the matrices of a dense step. Records are fetched ahead up to part_last; cold: nothing came before in this part.
  void factors(int64_t first, int64_t last, int64_t part_last, bool cold);
  // Add their rows of W2, at most kBlock of them, to acc [T, D].
  void add(int64_t first, int64_t last, int64_t part_last, float* acc) const;
  // The same for all units, by pairs.
  void add_dense(Pool& pool);

  const RowKernels* rows_ = nullptr;
  RecordLayer layer_ = {};
  bool exact_ = false, dense_ = false, replaces_ = false;
  float limit_ = 0;
  int64_t tokens_ = 0, slots_ = 0, parts_ = 0, span_ = 0;  // span: units of a part
  std::vector<int32_t> experts_;  // [pairs]
  std::vector<float> weights_;    // [pairs]
  Groups groups_;
  Activations activations_;
  std::vector<int64_t> chosen_;  // [active pairs] units it chose
  std::vector<Count> before_;    // [active experts + 1] units and choices of the experts before
  Count total_ = {0, 0};
  std::vector<Unit> units_;        // total_.units in use
  std::vector<int32_t> position_;  // of a choice, among the pairs of the unit's expert; total_.choices in use
  Buffer values_;
  float *u_ = nullptr, *v_ = nullptr, *h0_ = nullptr;  // of a choice, in values_
  PartialSums sums_;
  PairSums pair_sums_;
  std::vector<int64_t> matrix_;                // [active experts] where the factors [tokens, units] of each start
  Buffer matrices_;                            // of the base's rows, then of the residual's
  float *base_ = nullptr, *residual_ = nullptr;  // in matrices_
};

}  // namespace rapidmoe
