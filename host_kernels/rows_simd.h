// Row kernels written once over a vector trait V; included by rows_avx2.cc and rows_avx512.cc, each inside
// its own target pragma. V gives: F (float vector), W (floats a vector), Codes (64 codes in registers),
// unpack<bits>, store, dot (64 codes x 64 int8, as F of partial sums), load/set/fma/add/sum, widen (W codes
// of a byte buffer to F), halves (half -> float array), quantize. The float32 rounding order differs from the
// scalar table's; the integer part is exact in both. Sums is a vector of int16 sums of a group's 64 columns:
// clear, add_pair (two rows' codes times a pair of int8), flush (to float, times step, plus shift, onto acc).
#include "layout.h"
#include "rows.h"

namespace rapidmoe {
namespace {

constexpr int64_t kScaleChunk = 64;  // groups whose scales are expanded at a time, on the stack

// Scale and offset of n <= kScaleChunk groups from g0, as float32.
template <class V, int bits>
inline void expand_scales(const Row& row, int64_t g0, int64_t n, float* scale, float* offset) {
  V::halves(row.scale + g0, n, scale);
  if (row.offset) {
    V::halves(row.offset + g0, n, offset);
  } else {
    for (int64_t i = 0; i < n; ++i) offset[i] = scale[i] * (-0.5f * ((1 << bits) - 1));
  }
}

template <class V, int bits, int N>
inline void dot_i8_block(const Row& row, int64_t d, const Activation* const* x, float* out) {
  typename V::F total[N];
  float shift[N];
  for (int t = 0; t < N; ++t) total[t] = V::set(0), shift[t] = 0;
  const int64_t groups = d / kGroup;
  float scale[kScaleChunk], offset[kScaleChunk];
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleChunk) {
    const int64_t n = groups - g0 < kScaleChunk ? groups - g0 : kScaleChunk;
    expand_scales<V, bits>(row, g0, n, scale, offset);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t g = g0 + i;
      const typename V::Codes codes = V::template unpack<bits>(row.codes, d, g);
      for (int t = 0; t < N; ++t) {
        total[t] = V::fma(V::dot(codes, x[t]->q + g * kGroup), V::set(scale[i] * x[t]->scale[g]), total[t]);
        shift[t] += offset[i] * x[t]->sum[g];
      }
    }
  }
  for (int t = 0; t < N; ++t) out[t] = V::sum(total[t]) + shift[t];
}

template <class V, int bits>
void dot_i8(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out) {
  int64_t t = 0;
  for (; t + 4 <= n; t += 4) dot_i8_block<V, bits, 4>(row, d, x + t, out + t);
  for (; t < n; ++t) dot_i8_block<V, bits, 1>(row, d, x + t, out + t);
}

// Calls body(element, F of W codes times scale plus offset) over the whole row; `a` multiplies both.
template <class V, int bits, class Body>
inline void for_weights(const Row& row, float a, int64_t d, Body body) {
  float scale[kScaleChunk], offset[kScaleChunk];
  alignas(64) uint8_t buffer[kGroup];
  const int64_t groups = d / kGroup;
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleChunk) {
    const int64_t n = groups - g0 < kScaleChunk ? groups - g0 : kScaleChunk;
    expand_scales<V, bits>(row, g0, n, scale, offset);
    for (int64_t i = 0; i < n; ++i) {
      V::store(V::template unpack<bits>(row.codes, d, g0 + i), buffer);
      const typename V::F s = V::set(a * scale[i]), o = V::set(a * offset[i]);
      for (int64_t e = 0; e < kGroup; e += V::W) body((g0 + i) * kGroup + e, V::fma(V::widen(buffer + e), s, o));
    }
  }
}

template <class V, int bits>
void dequantize(const Row& row, int64_t d, float* w) {
  for_weights<V, bits>(row, 1.0f, d, [&](int64_t i, typename V::F value) { V::put(w + i, value); });
}

template <class V, int bits>
void add(const Row& row, float a, int64_t d, float* acc) {
  for_weights<V, bits>(row, a, d,
                       [&](int64_t i, typename V::F value) { V::put(acc + i, V::add(V::load(acc + i), value)); });
}

template <class V, int bits>
void dot_f32(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out) {
  for (int64_t t = 0; t < n; ++t) {
    typename V::F even = V::set(0), odd = V::set(0);
    for_weights<V, bits>(row, 1.0f, d, [&](int64_t i, typename V::F value) {
      typename V::F& total = i & V::W ? odd : even;
      total = V::fma(V::load(x[t]->x + i), value, total);
    });
    out[t] = V::sum(V::add(even, odd));
  }
}

template <class V, int base_bits, int residual_bits>
void add_pair(const Row& base, float a, const Row& residual, float b, int64_t d, float* acc) {
  float sb[kScaleChunk], ob[kScaleChunk], sr[kScaleChunk], orr[kScaleChunk];
  alignas(64) uint8_t cb[kGroup], cr[kGroup];
  const int64_t groups = d / kGroup;
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleChunk) {
    const int64_t n = groups - g0 < kScaleChunk ? groups - g0 : kScaleChunk;
    expand_scales<V, base_bits>(base, g0, n, sb, ob);
    expand_scales<V, residual_bits>(residual, g0, n, sr, orr);
    for (int64_t i = 0; i < n; ++i) {
      V::store(V::template unpack<base_bits>(base.codes, d, g0 + i), cb);
      V::store(V::template unpack<residual_bits>(residual.codes, d, g0 + i), cr);
      const typename V::F x = V::set(a * sb[i]), y = V::set(b * sr[i]), o = V::set(a * ob[i] + b * orr[i]);
      float* out = acc + (g0 + i) * kGroup;
      for (int64_t e = 0; e < kGroup; e += V::W) {
        const typename V::F value = V::fma(V::widen(cb + e), x, V::fma(V::widen(cr + e), y, o));
        V::put(out + e, V::add(V::load(out + e), value));
      }
    }
  }
}

// Coefficient pairs, step and shift of up to kScaleChunk groups of a block.
struct BlockScales {
  uint16_t high[kBlock / 2][kScaleChunk];  // two int8: even row in the low byte
  uint16_t low[kBlock / 2][kScaleChunk];   // fine only: coefficient = 128 * high + low
  float step[kScaleChunk], shift[kScaleChunk];
};

// Round to the nearest integer, ties to even; |x| < 2^22.
inline int32_t round_small(float x) {
  const float sum = x + 12582912.0f;  // 1.5 * 2^23: the integer stands in the low bits of the sum
  int32_t bits;
  __builtin_memcpy(&bits, &sum, 4);
  return bits - 0x4b400000;
}

template <class V, int even, int odd, int limit>
inline void expand_block(const Row* rows, const float* coefficients, int64_t g0, int64_t n, BlockScales* out) {
  float product[kBlock][kScaleChunk], offset[kScaleChunk], inverse[kScaleChunk];
  for (int64_t i = 0; i < n; ++i) out->step[i] = out->shift[i] = 0;
  for (int r = 0; r < kBlock; ++r) {
    if (r % 2) {
      expand_scales<V, odd>(rows[r], g0, n, product[r], offset);
    } else {
      expand_scales<V, even>(rows[r], g0, n, product[r], offset);
    }
    const float a = coefficients[r];
    for (int64_t i = 0; i < n; ++i) {
      product[r][i] *= a;
      out->shift[i] += a * offset[i];  // NaN and Inf come through here
      const float size = __builtin_fabsf(product[r][i]);
      out->step[i] = size > out->step[i] ? size : out->step[i];
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    out->step[i] /= limit;
    inverse[i] = out->step[i] >= 1e-37f ? 1.0f / out->step[i] : 0.0f;
  }
  for (int p = 0; p < kBlock / 2; ++p)
    for (int64_t i = 0; i < n; ++i) {
      int32_t a = round_small(product[2 * p][i] * inverse[i]), b = round_small(product[2 * p + 1][i] * inverse[i]);
      if constexpr (limit == kFine) {
        const int32_t high_a = (a + 64) >> 7, high_b = (b + 64) >> 7;  // leaves -64 .. 63
        out->low[p][i] = uint16_t(((a - high_a * 128) & 255) | ((b - high_b * 128) & 255) << 8);
        a = high_a, b = high_b;
      }
      out->high[p][i] = uint16_t((a & 255) | (b & 255) << 8);
    }
}

template <class V, int even, int odd, int limit>
void add_block(const Row* rows, const float* coefficients, int64_t d, float* acc) {
  BlockScales scales;
  const int64_t groups = d / kGroup;
  for (int64_t g0 = 0; g0 < groups; g0 += kScaleChunk) {
    const int64_t n = groups - g0 < kScaleChunk ? groups - g0 : kScaleChunk;
    expand_block<V, even, odd, limit>(rows, coefficients, g0, n, &scales);
    for (int64_t i = 0; i < n; ++i) {
      typename V::Sums high = V::clear(), low = V::clear();
      for (int p = 0; p < kBlock / 2; ++p) {
        const typename V::Codes first = V::template unpack<even>(rows[2 * p].codes, d, g0 + i);
        const typename V::Codes second = V::template unpack<odd>(rows[2 * p + 1].codes, d, g0 + i);
        V::add_pair(high, first, second, scales.high[p][i]);
        if constexpr (limit == kFine) V::add_pair(low, first, second, scales.low[p][i]);
      }
      float* out = acc + (g0 + i) * kGroup;
      if constexpr (limit == kFine) {
        V::flush(high, scales.step[i] * 128, scales.shift[i], out);
        V::flush(low, scales.step[i], 0, out);
      } else {
        V::flush(high, scales.step[i], scales.shift[i], out);
      }
    }
  }
}

template <class V>
void add_f32(const float* w, float a, int64_t d, float* acc) {
  const typename V::F s = V::set(a);
  for (int64_t i = 0; i < d; i += V::W) V::put(acc + i, V::fma(V::load(w + i), s, V::load(acc + i)));
}

template <class V>
const RowKernels* simd_table(const char* name) {
  static const RowKernels table = {
      name,
      V::quantize,
      {nullptr, nullptr, dot_i8<V, 2>, dot_i8<V, 3>, dot_i8<V, 4>},
      {nullptr, nullptr, dot_f32<V, 2>, dot_f32<V, 3>, dot_f32<V, 4>},
      {nullptr, nullptr, dequantize<V, 2>, dequantize<V, 3>, dequantize<V, 4>},
      {{},
       {},
       {nullptr, nullptr, add_pair<V, 2, 2>, nullptr, add_pair<V, 2, 4>},
       {nullptr, nullptr, add_pair<V, 3, 2>, nullptr, add_pair<V, 3, 4>},
       {nullptr, nullptr, add_pair<V, 4, 2>, nullptr, add_pair<V, 4, 4>}},
      {nullptr, nullptr, add<V, 2>, add<V, 3>, add<V, 4>},
      {{},
       {},
       {nullptr, nullptr, add_block<V, 2, 2, 127>, nullptr, add_block<V, 2, 4, 127>},
       {nullptr, nullptr, add_block<V, 3, 2, 127>, nullptr, add_block<V, 3, 4, 127>},
       {nullptr, nullptr, add_block<V, 4, 2, 127>, nullptr, add_block<V, 4, 4, 127>}},
      {nullptr, nullptr, add_block<V, 2, 2, kFine>, add_block<V, 3, 3, kFine>, add_block<V, 4, 4, kFine>},
      add_f32<V>};
  return &table;
}

}  // namespace
}  // namespace rapidmoe
