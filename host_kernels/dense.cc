#include "dense.h"

namespace rapidmoe {

bool is_dense(const Groups& groups) { return groups.pairs.size() >= 4 * groups.experts.size(); }

void dense_items(const Groups& groups, int64_t width, int64_t many, std::vector<DenseItem>* items) {
  items->clear();
  const int64_t all = width / kGroup;
  for (size_t a = 0; a < groups.experts.size(); ++a) {
    const int64_t step = groups.begin[a + 1] - groups.begin[a] < many ? all : kItemGroups;
    for (int64_t g = 0; g < all; g += step) items->push_back({int64_t(a), g, std::min(all, g + step)});
  }
}

void dense_sum_many(const RowKernels& rows, const DenseItem& item, int bits, const std::vector<Row>& all, const More& more,
                    int64_t width, const int32_t* pairs, int64_t n, const float* coefficients, PairSums& sums) {
  const int64_t count = int64_t(all.size());
  thread_local std::vector<float*> out;
  out.resize(n);
  for (int64_t r = 0; r < count; r += kManyUnits)
    for (int64_t g = item.first; g < item.last; g += kStrip) {
      for (int64_t i = 0; i < n; ++i) out[i] = sums.row(pairs[i]) + g * kGroup;
      rows.sum_many[bits](all.data() + r, {more.rows ? more.rows + r : nullptr, more.bits},
                          std::min(kManyUnits, count - r), width, g, n, coefficients + r, count, out.data());
    }
}

void dense_sum(const RowKernels& rows, const DenseItem& item, int bits, bool fine, const std::vector<Row>& all,
               int64_t width, const int32_t* pairs, int64_t n, const float* coefficients, PairSums& sums) {
  if (n >= rows.many) return dense_sum_many(rows, item, bits, all, {}, width, pairs, n, coefficients, sums);
  const int64_t count = int64_t(all.size());
  for (int64_t r0 = 0; r0 < count; r0 += kBlock) {
    const int64_t left = std::min<int64_t>(kBlock, count - r0);
    Row block[kBlock];
    for (int64_t r = 0; r < kBlock; ++r) block[r] = all[r0 + std::min(r, left - 1)];
    for (int64_t i = 0; i < n; ++i) {
      float some[kBlock] = {};
      bool any = false;
      for (int64_t r = 0; r < left; ++r) any |= (some[r] = coefficients[i * count + r0 + r]) != 0;
      if (any) (fine ? rows.add_block_fine : rows.add_block)[bits](block, some, width, sums.row(pairs[i]));
    }
  }
}

}  // namespace rapidmoe
