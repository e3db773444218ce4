// What the base and the residual kernels share: pairs grouped by expert, activations in int8, partial sums.
#pragma once
#include <cstdint>
#include <vector>

#include "buffer.h"
#include "layout.h"
#include "pool.h"
#include "rows.h"

namespace rapidmoe {

// A step's shape: T tokens of width D, k routed slots each; pair p = token * k + slot.
struct Step {
  int64_t tokens, slots, width;
  const float* x;           // [T, D]
  const int32_t* experts;   // [T, k] expert ids; -1 = no expert (a padded or finished row)
  int64_t pairs() const { return tokens * slots; }
};

// Pairs grouped by expert, experts ascending, pairs ascending within one.
struct Groups {
  std::vector<int32_t> experts;  // [A] active experts
  std::vector<int64_t> begin;    // [A + 1] into pairs
  std::vector<int32_t> pairs;
  // Throws std::invalid_argument naming the pair if an id is not in [-1, num_experts).
  void fill(const Step& step, int64_t num_experts);

 private:
  std::vector<int64_t> count_;
};

// A copy of the step's tokens: float32 if exact, else int8, and bfloat16 for a dense step where dot_many wants it. Other
// forms are null.
class Activations {
 public:
  void fill(const RowKernels& rows, Pool& pool, const Step& step, bool exact, bool dense);
  const Activation* operator[](int64_t token) const { return &tokens_[token]; }

 private:
  Buffer q_, x_, scales_, halves_;
  std::vector<Activation> tokens_;
};

// Sums over units, split in parts of fixed number and order, so that the result does not depend on which
// thread ran which part.
class PartialSums {
 public:
  // Parts for `units` rows of work on [tokens, width]: a function of the shapes and the machine alone. Every part is read
  // by another processor than wrote it, so a machine of few processors has few.
  static int64_t parts_for(int64_t units, int64_t tokens, int64_t width);
  void start(int64_t parts, int64_t tokens, int64_t width);
  int64_t parts() const { return parts_; }
  float* part(int64_t p);  // [T, D], zeroed by the caller's part
  void clear(int64_t p);
  // out = base + the sum of all parts; base may be null (zero) or out itself.
  void add_into(Pool& pool, const float* base, float* out) const;

 private:
  Buffer data_;
  float* sums_ = nullptr;
  int64_t parts_ = 0, tokens_ = 0, width_ = 0;
};

// One row a pair: what the pair's expert gives its token. For steps with many tokens an expert, where PartialSums would
// be large; no two experts write the same row.
class PairSums {
 public:
  void start(int64_t pairs, int64_t width);
  float* row(int64_t pair) { return sums_ + pair * width_; }
  // Zero groups first .. last - 1 of the rows of n pairs.
  void clear(const int32_t* pairs, int64_t n, int64_t first, int64_t last);
  // out[t] = base[t] + the sum over its slots with an expert, in order; base may be null (zero) or out itself.
  void add_into(Pool& pool, const Step& step, const float* base, float* out) const;

 private:
  Buffer data_;
  float* sums_ = nullptr;
  int64_t width_ = 0;
};

}  // namespace rapidmoe
