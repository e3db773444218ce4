// Row kernels written once over a vector trait V; included by rows_avx2.cc and rows_avx512.cc, each inside
// its own target pragma. V gives: F (float vector), W (floats a vector), Codes (64 codes in registers),
// unpack<bits>, store, dot (64 codes x 64 int8, as F of partial sums), load/set/fma/add/sum, widen (W codes
// of a byte buffer to F), halves (half -> float array), quantize. The float32 rounding order differs from the
// scalar table's; the integer part is exact in both.
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
      add_f32<V>};
  return &table;
}

}  // namespace
}  // namespace rapidmoe
