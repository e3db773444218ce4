// Splits one expert without data: nested base codes, residual codes, both packed, norms. The definition, bit for bit,
// is rapidmoe_jax/quant.py: quantize_nested, then quantize_residual, then pack.
#pragma once
#include <cstdint>

#include "layout.h"

namespace rapidmoe {

// One expert of `units` units; weights are [3, units, width]: gate, up, and down with a row a unit.
struct NestedSplit {
  const float* weights;
  int64_t units, width;  // width: a multiple of 64
  int base_bits, residual_bits;
  uint8_t* codes;            // [3, units, row_bytes(base_bits, width)]
  uint16_t *scale, *offset;  // [3, units, width / 64] half
  uint8_t* records;          // [units, RecordLayout::bytes], zero
  float* norms;              // [units, 4]: |R1|^2, |R3|^2, |R2|^2, |B2|^2
  double* sums;              // [units, 3]: squares of the weights, of what the base lost, of what is left
};

// Split units first .. last - 1.
void split_nested(const NestedSplit& job, int64_t first, int64_t last);

// Nearest half, ties to even; beyond the largest one infinite.
uint16_t float_to_half(float value);

}  // namespace rapidmoe
