// Steps with many tokens an expert (prefill): rows are unpacked once for all tokens, sums are kept a row a pair.
#pragma once
#include <algorithm>
#include <vector>

#include "routing.h"

namespace rapidmoe {

constexpr int64_t kMany = 12;        // tokens of an expert from which unpacking its rows first pays
constexpr int64_t kManyUnits = 128;  // units that one part works on

// Whether sums go by pairs: four tokens an expert or more, on average.
bool is_dense(const Groups& groups);

// A part of the work on W2: one active expert, all columns (first == -1) or the kStrip groups from `first` on.
struct DenseItem {
  int64_t active, first;
};
// Experts with kMany tokens and more are cut into strips.
void dense_items(const Groups& groups, int64_t width, std::vector<DenseItem>* items);

// sums[pair of token i] += sum over r of coefficients[i * count + r] * row_of(r), on the columns of an item, for the n
// tokens of its expert; rows of few tokens are summed by add_block (fine: by add_block_fine).
template <class RowOf>
void dense_sum(const RowKernels& rows, const DenseItem& item, int bits, bool fine, int64_t count, int64_t width,
               const int32_t* pairs, int64_t n, const float* coefficients, RowOf row_of, PairSums& sums) {
  thread_local std::vector<Row> all;
  thread_local std::vector<float*> out;
  all.resize(count), out.resize(n);
  for (int64_t r = 0; r < count; ++r) all[r] = row_of(r);
  for (int64_t i = 0; i < n; ++i) out[i] = sums.row(pairs[i]) + (item.first < 0 ? 0 : item.first * kGroup);
  if (item.first >= 0) {
    rows.sum_many[bits](all.data(), count, width, item.first, n, coefficients, out.data());
    return;
  }
  for (int64_t r0 = 0; r0 < count; r0 += kBlock) {
    const int64_t left = std::min<int64_t>(kBlock, count - r0);
    Row block[kBlock];
    for (int64_t r = 0; r < kBlock; ++r) block[r] = all[r0 + std::min(r, left - 1)];
    for (int64_t i = 0; i < n; ++i) {
      float some[kBlock] = {};
      bool any = false;
      for (int64_t r = 0; r < left; ++r) any |= (some[r] = coefficients[i * count + r0 + r]) != 0;
      if (any) (fine ? rows.add_block_fine : rows.add_block)[bits](block, some, width, out[i]);
    }
  }
}

}  // namespace rapidmoe
