// Rows in float32, and the small vector functions: see rows_simd.h. Included by the same files.
#pragma once
#include "rows_simd.h"

namespace rapidmoe {
namespace {

// Calls body(element, F of W codes times scale plus offset) for groups first .. last - 1 of a row; `a` multiplies both.
// `first` is a multiple of kStrip.
template <class V, int bits, class Body>
inline void for_weights(const Row& row, float a, int64_t d, int64_t first, int64_t last, Body body) {
  using C = Chunk<V, bits>;
  static_assert(kStrip % C::kGroups == 0 && V::W % kStrip == 0, "a strip is whole chunks");
  const int64_t groups = d / kGroup;
  alignas(64) uint8_t buffer[C::kPlanes][V::kBytes];
  float scale[V::W], offset[V::W];
  for (int64_t g = first; g < last; ++g) {
    if ((g - first) % V::W == 0) {
      typename V::F s, o;
      load_scales<V, bits>(row, g, last - g < V::W ? last - g : V::W, &s, &o);
      V::put(scale, s), V::put(offset, o);
    }
    if (g % C::kGroups == 0) {
      typename V::I planes[C::kPlanes];
      unpack<V, bits>(load_chunk<V, bits>(row, groups, g / C::kGroups), planes);
      for (int i = 0; i < C::kPlanes; ++i) V::store(planes[i], buffer[i]);
    }
    const typename V::F s = V::set(a * scale[(g - first) % V::W]), o = V::set(a * offset[(g - first) % V::W]);
    const int64_t run = 8 * C::kPlane;  // codes of a group that stand together in a plane
    for (int64_t e = 0; e < kGroup; e += V::W)
      body(g * kGroup + e, V::fma(V::widen(&buffer[e / run][g % C::kGroups * run + e % run]), s, o));
  }
}

template <class V, int bits>
void dequantize(const Row& row, int64_t d, float* w) {
  for_weights<V, bits>(row, 1.0f, d, 0, d / kGroup, [&](int64_t i, typename V::F value) { V::put(w + i, value); });
}

template <class V, int bits>
void add(const Row& row, float a, int64_t d, float* acc) {
  for_weights<V, bits>(row, a, d, 0, d / kGroup, [&](int64_t i, typename V::F value) {
    V::put(acc + i, V::add(V::load(acc + i), value));
  });
}

template <class V, int bits>
void dot_f32(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out) {
  for (int64_t t = 0; t < n; ++t) {
    typename V::F even = V::set(0), odd = V::set(0);
    for_weights<V, bits>(row, 1.0f, d, 0, d / kGroup, [&](int64_t i, typename V::F value) {
      typename V::F& total = i & V::W ? odd : even;
      total = V::fma(V::load(x[t]->x + i), value, total);
    });
    out[t] = V::sum(V::add(even, odd));
  }
}

// q in the order of the planes of the chunks of rows of `bits`.
template <class V, int bits>
inline void reorder(const int8_t* q, int64_t d, int8_t* out) {
  using C = Chunk<V, bits>;
  constexpr int64_t run = 8 * C::kPlane;
  for (int64_t g0 = 0; g0 < padded_width(d) / kGroup; g0 += C::kGroups)
    for (int p = 0; p < C::kPlanes; ++p)
      for (int64_t g = g0; g < g0 + C::kGroups; ++g, out += run) __builtin_memcpy(out, q + g * kGroup + p * run, run);
}

template <class V>
void quantize(const float* x, int64_t d, int8_t* q, int8_t* q2, int8_t* q4, float* scale, float* sum) {
  V::quantize(x, d, q, scale, sum);
  const int64_t padded = padded_width(d);
  __builtin_memset(q + d, 0, size_t(padded - d));
  for (int64_t g = d / kGroup; g < padded / kGroup; ++g) scale[g] = sum[g] = 0;
  reorder<V, 2>(q, d, q2);
  reorder<V, 4>(q, d, q4);
}

// e^x to about 2e-7 of itself; 0 below -87, inf above 88.7, NaN stays.
template <class V>
inline typename V::F exp_of(typename V::F x) {
  using F = typename V::F;
  const F clipped = V::clamp(x, V::set(-87.0f), V::set(88.8f));
  const F n = V::nearest(V::mul(clipped, V::set(1.44269504f)));
  F r = V::fma(n, V::set(-0.693359375f), clipped);  // ln 2 in two parts
  r = V::fma(n, V::set(2.12194440e-4f), r);
  // minimax polynomial of (e^r - 1 - r) / r^2 (Cephes, expf)
  constexpr float kC[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                          4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  F p = V::set(kC[0]);
  for (int i = 1; i < 6; ++i) p = V::fma(p, r, V::set(kC[i]));
  return V::times_two_to(V::add(V::fma(V::mul(r, r), p, r), V::set(1.0f)), n);
}

template <class V>
void silu_mul(const float* u, const float* v, int64_t n, float* h) {
  const auto some = [](const float* u, const float* v, float* h) {
    const typename V::F x = V::load(u);
    V::put(h, V::mul(V::div(x, V::add(V::set(1.0f), exp_of<V>(V::sub(V::set(0.0f), x)))), V::load(v)));
  };
  int64_t i = 0;
  for (; i + V::W <= n; i += V::W) some(u + i, v + i, h + i);
  if (i == n) return;
  float tail[3][V::W] = {};
  __builtin_memcpy(tail[0], u + i, size_t(n - i) * 4);
  __builtin_memcpy(tail[1], v + i, size_t(n - i) * 4);
  some(tail[0], tail[1], tail[2]);
  __builtin_memcpy(h + i, tail[2], size_t(n - i) * 4);
}

}  // namespace
}  // namespace rapidmoe
