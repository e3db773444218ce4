// The row kernels: dot products and scaled sums of one packed row, one table an instruction set.
// Everything above (experts.cc, residual.cc) is written in terms of this table and knows no intrinsics.
#pragma once
#include <cstdint>

namespace rapidmoe {

// A packed row of D weights. offset == nullptr: symmetric, offset = -(2^bits - 1) / 2 * scale.
struct Row {
  const uint8_t* codes;
  const uint16_t* scale;   // [D / 64] half
  const uint16_t* offset;  // [D / 64] half or nullptr
};

// One token's activations, in both forms; int8 has a scale a group of 64: x ~ scale[g] * q.
struct Activation {
  const float* x;      // [D]
  const int8_t* q;     // [D], |q| <= 127
  const float* scale;  // [D / 64]; NaN where the group held NaN or Inf
  const float* sum;    // [D / 64], scale[g] * sum of q over the group
};

constexpr int kBlock = 16;         // rows that add_block sums at once
constexpr int kFine = 127 * 128;  // largest coefficient of add_block_fine

// Functions are indexed by bits (2, 3, 4); other entries are null. D is a multiple of 64.
struct RowKernels {
  const char* name;
  // Fill q, scale and sum from x.
  void (*quantize)(const float* x, int64_t d, int8_t* q, float* scale, float* sum);
  // out[i] = row . x_i for n tokens, from the int8 form (integer dot, float32 across groups).
  void (*dot_i8[5])(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out);
  // The same from the float32 form.
  void (*dot_f32[5])(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out);
  // w[i] = the row's weights in float32.
  void (*dequantize[5])(const Row& row, int64_t d, float* w);
  // acc += a * base + b * residual, straight from the codes. [base_bits][residual_bits]
  void (*add_pair[5][5])(const Row& base, float a, const Row& residual, float b, int64_t d, float* acc);
  // acc += a * row, straight from the codes.
  void (*add[5])(const Row& row, float a, int64_t d, float* acc);
  // acc += sum over kBlock rows of coefficient * row, even rows of `even` bits, odd ones of `odd` bits. In each group
  // the products coefficient * scale are rounded to int8 with one step for all rows, 1/127 of the largest: the error of
  // an element is at most 1/254 of it a row and code, offsets are exact. [even][odd]
  void (*add_block[5][5])(const Row* rows, const float* coefficients, int64_t d, float* acc);
  // The same with the products rounded to 128 * int8 + int8, for kBlock rows of the same bits: 128 times finer.
  void (*add_block_fine[5])(const Row* rows, const float* coefficients, int64_t d, float* acc);
  // acc += a * w, plain float32.
  void (*add_f32)(const float* w, float a, int64_t d, float* acc);
};

// The scalar table: the definition of all others.
const RowKernels& rows_scalar();
// nullptr where not compiled in or not supported by this processor.
const RowKernels* rows_avx2();
const RowKernels* rows_avx512();

// The best table of this machine at or below `name` ("scalar", "avx2", "avx512"; "auto" = best).
// nullptr if the named one is not available here.
const RowKernels* find_rows(const char* name);

}  // namespace rapidmoe
