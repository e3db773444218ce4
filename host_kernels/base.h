// The base path on the CPU: every routed expert from its low-bit codes. No XLA, no Python.
#pragma once
#include "routing.h"

namespace rapidmoe {

// One layer's base: codes [E, 3, F, D * bits / 8], scale and offset [E, 3, F, D / 64] half.
// Matrix 0 = gate_proj (W1), 1 = up_proj (W3), 2 = down_proj (W2, one row a unit).
struct BaseLayer {
  const uint8_t* codes;
  const uint16_t* scale;
  const uint16_t* offset;
  int64_t experts, units, width;
  int bits;
  // `ahead` rows on are fetched into the cache while this one is read.
  Row row(int64_t expert, int matrix, int64_t unit, int64_t ahead = 0) const {
    const int64_t i = (expert * 3 + matrix) * units + unit;
    return {codes + i * row_bytes(bits, width), scale + i * (width / kGroup), offset + i * (width / kGroup),
            ahead * row_bytes(bits, width), ahead * scale_bytes(width)};
  }
};

// u0 = B1 x, v0 = B3 x, h0 = silu(u0) * v0 for every pair, each [T, k, F]; zero where the expert id is -1.
// exact: float32 activations; otherwise int8 with a scale a group of 64.
void base_gate_up(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, bool exact, float* u0,
                  float* v0, float* h0);

// y[t] = sum over slots of weight * B2 h0, [T, D]. step.x is not read.
// exact: float32 sums; otherwise RowKernels::add_block_fine, and sum_many for experts with many tokens.
void base_down(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, bool exact,
               const float* weights, const float* h0, float* y);

}  // namespace rapidmoe
