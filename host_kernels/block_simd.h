// Scaled sums of a block of rows, for one token: see rows_simd.h. Included by the same files.
#pragma once
#include "rows_simd.h"

namespace rapidmoe {
namespace {

// Coefficients of a block for W groups: int8 of four rows a dword, step and shift a group.
template <class V>
struct BlockScales {
  typename V::I high[kBlock / 4], low[kBlock / 4];  // low: fine only, coefficient = 128 * high + low
  alignas(64) float step[V::W], shift[V::W];
};

template <class V, int bits, bool fine>
inline void expand_block(const Row* rows, const float* coefficients, int64_t g0, int64_t n, BlockScales<V>* out) {
  using F = typename V::F;
  F product[kBlock], largest = V::set(0), shift = V::set(0);
  for (int r = 0; r < kBlock; ++r) {
    F scale, offset;
    load_scales<V, bits>(rows[r], g0, n, &scale, &offset);
    const F a = V::set(coefficients[r]);
    product[r] = V::mul(scale, a);
    shift = V::fma(offset, a, shift);  // NaN and Inf come through here
    largest = V::max_abs(product[r], largest);
  }
  const F step = V::mul(largest, V::set(1.0f / (fine ? kFine : 127)));
  const F inverse = V::inverse(step);
  V::put(out->step, step), V::put(out->shift, shift);
  for (int p = 0; p < kBlock / 4; ++p) {
    typename V::I value[4], rest[4];
    for (int r = 0; r < 4; ++r) {
      value[r] = V::round(V::mul(product[4 * p + r], inverse));
      if constexpr (fine) rest[r] = V::split128(&value[r]);
    }
    out->high[p] = V::pack4(value);
    if constexpr (fine) out->low[p] = V::pack4(rest);
  }
}

// One chunk of a block into acc: half of a lane's columns at a time, to stay within the registers.
template <class V, int bits, bool fine>
inline void add_chunk(const Row* rows, const BlockScales<V>& scales, int i, int64_t c, int64_t d, float* acc) {
  using C = Chunk<V, bits>;
  using I = typename V::I;
  const int64_t groups = d / kGroup;
  typename V::F sums[C::kPlanes][4];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    I high[2][C::kPlanes], low[2][C::kPlanes];
    for (int m = 0; m < 2; ++m)
      for (int p = 0; p < C::kPlanes; ++p) high[m][p] = low[m][p] = V::zero();
#pragma GCC unroll 4
    for (int quad = 0; quad < kBlock / 4; ++quad) {
      Packed<V, bits> row[4], mixed[2];
      for (int r = 0; r < 4; ++r) row[r] = load_chunk<V, bits>(rows[4 * quad + r], groups, c);
      V::interleave(half, row[0].low, row[1].low, row[2].low, row[3].low, &mixed[0].low, &mixed[1].low);
      if constexpr (bits == 3)
        V::interleave(half, row[0].high, row[1].high, row[2].high, row[3].high, &mixed[0].high, &mixed[1].high);
      const I k = V::template spread<C::kGroups>(scales.high[quad], i);
      for (int m = 0; m < 2; ++m) {
        I planes[C::kPlanes];
        unpack<V, bits>(mixed[m], planes);
        for (int p = 0; p < C::kPlanes; ++p) high[m][p] = V::mac(high[m][p], planes[p], k);
        if constexpr (fine) {
          const I rest = V::template spread<C::kGroups>(scales.low[quad], i);
          for (int p = 0; p < C::kPlanes; ++p) low[m][p] = V::mac(low[m][p], planes[p], rest);
        }
      }
    }
    for (int m = 0; m < 2; ++m)
      for (int p = 0; p < C::kPlanes; ++p)
        sums[p][2 * half + m] = fine ? V::to_float(V::add128(V::finish(high[m][p]), V::finish(low[m][p])))
                                     : V::to_float(V::finish(high[m][p]));
  }
  constexpr int kRun = 8 * C::kPlane;  // columns of a group that stand together in a plane
  for (int p = 0; p < C::kPlanes; ++p) {
    V::transpose(sums[p]);
    for (int j = 0; j < 4; ++j) {
      const int at = j * int(V::W), group = at / kRun;  // position in the plane
      if (c * C::kGroups + group >= groups) break;
      float* out = acc + (c * C::kGroups + group) * kGroup + p * kRun + at % kRun;
      const int g = i * C::kGroups + group;
      V::put(out, V::add(V::load(out), V::fma(sums[p][j], V::set(scales.step[g]), V::set(scales.shift[g]))));
    }
  }
}

template <class V, int bits, bool fine>
void add_block(const Row* rows, const float* coefficients, int64_t d, float* acc) {
  using C = Chunk<V, bits>;
  BlockScales<V> scales;
  const int64_t groups = d / kGroup;
  for (int64_t g0 = 0; g0 < groups; g0 += V::W) {
    const int64_t n = groups - g0 < V::W ? groups - g0 : V::W;
    expand_block<V, bits, fine>(rows, coefficients, g0, n, &scales);
    for (int i = 0; i * C::kGroups < n; ++i)
      add_chunk<V, bits, fine>(rows, scales, i, g0 / C::kGroups + i, d, acc);
  }
}

}  // namespace
}  // namespace rapidmoe
