// Row kernels written once over a vector trait V; included by rows_avx2.cc and rows_avx512.cc, each inside
// its own target pragma. The float32 rounding order differs from the scalar table's; the integer part is exact in both.
//
// A row is read in chunks of one vector (V::kBytes) of 4- or 2-bit codes: kGroups whole groups, a 128-bit lane holding
// bytes of one group. Shifted and masked, a chunk gives 8 / bits planes of codes; q2 and q4 of an activation are in the
// order of these planes. V gives: F (float vector), W (floats in it), I (integer vector); load, load_part (the first
// bytes, then zeros), high (a chunk's high bits of 3-bit codes, ready for merge), shift/low_bits/merge, dot, interleave,
// mac (u8 x s8 sums of four), finish (mac's sums, as int32), transpose (lanes of four vectors).
#pragma once
#include "layout.h"
#include "rows.h"

namespace rapidmoe {
namespace {

template <class V, int bits>
struct Chunk {
  static constexpr int kPlane = bits == 4 ? 4 : 2;              // bits of a code in the chunk itself
  static constexpr int kPlanes = 8 / kPlane;                    // vectors of codes it unpacks to
  static constexpr int kGroups = int(V::kBytes / (8 * kPlane)); // groups in it
  static constexpr int kPerBlock = int(V::W) / kGroups;         // chunks in a block of W groups
  static constexpr int64_t kHighBytes = 8 * kGroups;
};

inline void fetch(const void* p, int64_t ahead) { __builtin_prefetch(static_cast<const char*>(p) + ahead, 0, 2); }

// The codes of one chunk, before they are unpacked.
template <class V, int bits>
struct Packed {
  typename V::I low, high;
};

// Chunk c of a row; groups = D / 64, past which it is zero.
template <class V, int bits>
inline Packed<V, bits> load_chunk(const Row& row, int64_t groups, int64_t c) {
  using C = Chunk<V, bits>;
  const uint8_t* low = row.codes + c * V::kBytes;
  const uint8_t* high = row.codes + groups * 16 + c * C::kHighBytes;
  const int64_t left = groups - c * C::kGroups;
  fetch(low, row.ahead);
  if constexpr (bits == 3) fetch(high, row.ahead);
  Packed<V, bits> out;
  if (left >= C::kGroups) {
    out.low = V::load(low);
    if constexpr (bits == 3) out.high = V::high(high);
  } else {
    out.low = V::load_part(low, left * 8 * C::kPlane);
    if constexpr (bits == 3) {
      alignas(64) uint8_t part[64] = {};
      __builtin_memcpy(part, high, size_t(left * 8));
      out.high = V::high(part);
    }
  }
  return out;
}

template <class V, int bits>
inline void unpack(const Packed<V, bits>& p, typename V::I* planes) {
  if constexpr (bits == 4) {
    planes[0] = V::template low_bits<4>(p.low);
    planes[1] = V::template low_bits<4>(V::template shift<4>(p.low));
  } else if constexpr (bits == 2) {
    planes[0] = V::template low_bits<2>(p.low);
    planes[1] = V::template low_bits<2>(V::template shift<2>(p.low));
    planes[2] = V::template low_bits<2>(V::template shift<4>(p.low));
    planes[3] = V::template low_bits<2>(V::template shift<6>(p.low));
  } else {
    planes[0] = V::merge(p.low, V::template shift<-2>(p.high));
    planes[1] = V::merge(V::template shift<2>(p.low), p.high);
    planes[2] = V::merge(V::template shift<4>(p.low), V::template shift<2>(p.high));
    planes[3] = V::merge(V::template shift<6>(p.low), V::template shift<4>(p.high));
  }
}

// Scales and offsets of n <= W groups from g0 on, zero past them.
template <class V, int bits>
inline void load_scales(const Row& row, int64_t g0, int64_t n, typename V::F* scale, typename V::F* offset) {
  fetch(row.scale + g0, row.ahead_scale);
  if (row.offset) fetch(row.offset + g0, row.ahead_scale);
  *scale = V::halves(row.scale + g0, n);
  *offset = row.offset ? V::halves(row.offset + g0, n) : V::mul(*scale, V::set(-0.5f * ((1 << bits) - 1)));
}

template <class V, int bits, int N>
inline void dot_block(const Row* rows, int64_t d, const Activation* const* x, float* const* out, int64_t t0) {
  using C = Chunk<V, bits>;
  using F = typename V::F;
  const int64_t groups = d / kGroup;
  F total[2][N];
  for (int r = 0; r < 2; ++r)
    for (int t = 0; t < N; ++t) total[r][t] = V::set(0);
  for (int64_t g0 = 0; g0 < groups; g0 += V::W) {
    const int64_t n = groups - g0 < V::W ? groups - g0 : V::W;
    F product[2][N];
    for (int r = 0; r < 2; ++r) {
      F scale, offset;
      load_scales<V, bits>(rows[r], g0, n, &scale, &offset);
      for (int t = 0; t < N; ++t) {
        product[r][t] = V::mul(scale, V::load(x[t0 + t]->scale + g0));
        total[r][t] = V::fma(offset, V::load(x[t0 + t]->sum + g0), total[r][t]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < C::kPerBlock; ++i) {
      if (i * C::kGroups >= n) break;
      const int64_t c = g0 / C::kGroups + i;
      typename V::I planes[2][C::kPlanes];
      for (int r = 0; r < 2; ++r) {
        unpack<V, bits>(load_chunk<V, bits>(rows[r], groups, c), planes[r]);
      }
      for (int t = 0; t < N; ++t) {
        const int8_t* q = (bits == 4 ? x[t0 + t]->q4 : x[t0 + t]->q2) + c * C::kPlanes * V::kBytes;
        for (int r = 0; r < 2; ++r)
          total[r][t] = V::fma(V::template dot<C::kPlanes>(planes[r], q),
                               V::template spread<C::kGroups>(product[r][t], i), total[r][t]);
      }
    }
  }
  for (int r = 0; r < 2; ++r)
    for (int t = 0; t < N; ++t) out[r][t0 + t] = V::sum(total[r][t]);
}

template <class V, int bits>
void dot_i8(const Row& first, const Row& second, int64_t d, int64_t n, const Activation* const* x, float* a, float* b) {
  const Row rows[2] = {first, second};
  float* const out[2] = {a, b};
  int64_t t = 0;
  if constexpr (V::kTokens > 1)
    for (; t + V::kTokens <= n; t += V::kTokens) dot_block<V, bits, V::kTokens>(rows, d, x, out, t);
  for (; t < n; ++t) dot_block<V, bits, 1>(rows, d, x, out, t);
}

}  // namespace
}  // namespace rapidmoe
