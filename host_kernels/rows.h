// The row kernels: dot products and scaled sums of packed rows, one table an instruction set.
// Everything above (base.cc, residual.cc) is written in terms of this table and knows no intrinsics.
#pragma once
#include <cstdint>

#include "layout.h"

namespace rapidmoe {

// A packed row of D weights. offset == nullptr: symmetric, offset = -(2^bits - 1) / 2 * scale.
struct Row {
  const uint8_t* codes;
  const uint16_t* scale;   // [D / 64] half
  const uint16_t* offset;  // [D / 64] half or nullptr
  // codes + ahead, scale and offset + ahead_scale (bytes) are fetched into the cache while this row is read.
  int64_t ahead = 0, ahead_scale = 0;
};

// One token's activations, in both forms; int8 has a scale a group of 64: x ~ scale[g] * q.
// q comes in the orders in which a table meets the codes of a row; all are zero from D to padded_width(D).
struct Activation {
  const float* x;      // [D]
  const int8_t* q;     // plain order, |q| <= 127
  const int8_t* q2;    // order of rows of 2 and 3 bits
  const int8_t* q4;    // order of rows of 4 bits
  const float* scale;  // [padded_width / 64]; NaN where the group held NaN or Inf
  const float* sum;    // [padded_width / 64], scale[g] * sum of q over the group
  const uint16_t* half;  // [D] bfloat16, where RowKernels::round is not null
};

constexpr int64_t padded_width(int64_t d) { return (d + 1023) / 1024 * 1024; }

constexpr int kBlock = 16;        // rows that add_block sums at once
constexpr int64_t kStrip = 4;     // groups that sum_many sums at once
constexpr int kFine = 127 * 128;  // largest coefficient of add_block_fine

// Rows to be added to others before they are multiplied: the residual's to the base's.
struct More {
  const Row* rows = nullptr;  // nullptr: none
  int bits = 0;
};

// Functions are indexed by bits (2, 3, 4); other entries are null. D is a multiple of 64.
struct RowKernels {
  const char* name;
  // Fill q, q2, q4, scale and sum from x.
  void (*quantize)(const float* x, int64_t d, int8_t* q, int8_t* q2, int8_t* q4, float* scale, float* sum);
  // a[i] = first . x_i, b[i] = second . x_i for n tokens, from the int8 form (integer dot, float32 across groups).
  void (*dot_i8[5])(const Row& first, const Row& second, int64_t d, int64_t n, const Activation* const* x, float* a,
                    float* b);
  // out[i] = row . x_i from the float32 form.
  void (*dot_f32[5])(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out);
  // w[i] = the row's weights in float32.
  void (*dequantize[5])(const Row& row, int64_t d, float* w);
  // acc += a * row, straight from the codes, in float32.
  void (*add[5])(const Row& row, float a, int64_t d, float* acc);
  // acc += sum over kBlock rows of coefficient * row. In each group the products coefficient * scale are rounded to
  // int8 with one step for all rows, 1/127 of the largest: the error of an element is at most 1/254 of it a row and
  // code, offsets are exact.
  void (*add_block[5])(const Row* rows, const float* coefficients, int64_t d, float* acc);
  // The same with the products rounded to 128 * int8 + int8: 128 times finer.
  void (*add_block_fine[5])(const Row* rows, const float* coefficients, int64_t d, float* acc);
  // out[i][r] = rows[r] . x_i for many tokens: `count` rows at a time unpacked once for all of them. Where round is null,
  // from the int8 form, the same integers as dot_i8; else from bfloat16, weights rounded to it too (relative error 2^-7 a
  // product at most), sums float32.
  void (*dot_many[5])(const Row* rows, int64_t count, int64_t d, int64_t n, const Activation* const* x,
                      float* const* out);
  // out[i] += sum over r of coefficients[i * stride + r] * (rows[r] + more.rows[r]), for the columns of kStrip groups from group `first`
  // on (or those left); out[i] points at the first of these columns. Many tokens; weights and coefficients are rounded
  // to bfloat16 where the processor multiplies that (relative error 2^-7 a product at most), else all is float32.
  void (*sum_many[5])(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
                      const float* coefficients, int64_t stride, float* const* out);
  // h = silu(u) * v, n of each; h may be u or v.
  void (*silu_mul)(const float* u, const float* v, int64_t n, float* h);
  int64_t many = 16;  // tokens from which dot_many and sum_many are faster than one token at a time
  // half = x in bfloat16 for dot_many, D of them; null: dot_many reads the int8 form.
  void (*round)(const float* x, int64_t d, uint16_t* half) = nullptr;
};

// The scalar table: the definition of all others.
const RowKernels& rows_scalar();
// nullptr where not compiled in or not supported by this processor.
const RowKernels* rows_avx2();
const RowKernels* rows_avx512();
const RowKernels* rows_avx512_bf16();  // avx512 with sum_many in bfloat16; needs VBMI
const RowKernels* rows_amx();          // avx512_bf16 with AMX tiles in bfloat16 for many tokens

// The table named "scalar", "avx2", "avx512", "avx512_bf16" or "amx", or this machine's best for "auto".
// nullptr if the named one is not available here.
const RowKernels* find_rows(const char* name);

}  // namespace rapidmoe
