// Steps with many tokens an expert (prefill): rows are unpacked once for all tokens, sums are kept a row a pair.
#pragma once
#include <algorithm>
#include <vector>

#include "routing.h"

namespace rapidmoe {

constexpr int64_t kManyUnits = 128;  // units that one part works on, and rows summed before the next columns
constexpr int64_t kItemGroups = 16;  // groups of columns of an item

// Whether sums go by pairs: four tokens an expert or more, on average.
bool is_dense(const Groups& groups);

// A part of the work on W2: one active expert and its groups of columns first .. last - 1.
struct DenseItem {
  int64_t active, first, last;
};
// Experts with `many` tokens (RowKernels::many) and more are cut into items of kItemGroups groups, others are one item.
void dense_items(const Groups& groups, int64_t width, int64_t many, std::vector<DenseItem>* items);

// sums[pair of token i] += sum over r of coefficients[i * count + r] * rows[r], on the columns of an item, for the n
// tokens of its expert; rows of few tokens are summed by add_block (fine: by add_block_fine).
void dense_sum(const RowKernels& rows, const DenseItem& item, int bits, bool fine, const std::vector<Row>& all,
               int64_t width, const int32_t* pairs, int64_t n, const float* coefficients, PairSums& sums);
// The same by sum_many, with more.rows added to the rows.
void dense_sum_many(const RowKernels& rows, const DenseItem& item, int bits, const std::vector<Row>& all, const More& more,
                    int64_t width, const int32_t* pairs, int64_t n, const float* coefficients, PairSums& sums);

}  // namespace rapidmoe
