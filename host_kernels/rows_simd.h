// Row kernels written once over a vector trait V; included by rows_avx2.cc and rows_avx512.cc, each inside
// its own target pragma. The float32 rounding order differs from the scalar table's; the integer part is exact in both.
//
// A row is read in chunks of one vector (V::kBytes) of 4- or 2-bit codes: kGroups whole groups, a 128-bit lane holding
// bytes of one group. Shifted and masked, a chunk gives 8 / bits planes of codes; q2 and q4 of an activation are in the
// order of these planes. V gives: F (float vector), W (floats in it), I (integer vector); load, load_part (the first
// bytes, then zeros), high (a chunk's high bits of 3-bit codes, ready for merge), shift/low_bits/merge, dot, interleave,
// mac (u8 x s8 sums of four), finish (mac's sums, as int32), transpose (lanes of four vectors).
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

// Calls body(element, F of W codes times scale plus offset) over the whole row; `a` multiplies both.
template <class V, int bits, class Body>
inline void for_weights(const Row& row, float a, int64_t d, Body body) {
  using C = Chunk<V, bits>;
  const int64_t groups = d / kGroup;
  alignas(64) uint8_t buffer[C::kPlanes][V::kBytes];
  float scale[V::W], offset[V::W];
  for (int64_t g = 0; g < groups; ++g) {
    if (g % V::W == 0) {
      typename V::F s, o;
      load_scales<V, bits>(row, g, groups - g < V::W ? groups - g : V::W, &s, &o);
      V::put(scale, s), V::put(offset, o);
    }
    if (g % C::kGroups == 0) {
      typename V::I planes[C::kPlanes];
      unpack<V, bits>(load_chunk<V, bits>(row, groups, g / C::kGroups), planes);
      for (int i = 0; i < C::kPlanes; ++i) V::store(planes[i], buffer[i]);
    }
    const typename V::F s = V::set(a * scale[g % V::W]), o = V::set(a * offset[g % V::W]);
    const int64_t run = 8 * C::kPlane;  // codes of a group that stand together in a plane
    for (int64_t e = 0; e < kGroup; e += V::W)
      body(g * kGroup + e, V::fma(V::widen(&buffer[e / run][g % C::kGroups * run + e % run]), s, o));
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

template <class V>
const RowKernels* simd_table(const char* name) {
  static const RowKernels table = {
      name,
      quantize<V>,
      {nullptr, nullptr, dot_i8<V, 2>, dot_i8<V, 3>, dot_i8<V, 4>},
      {nullptr, nullptr, dot_f32<V, 2>, dot_f32<V, 3>, dot_f32<V, 4>},
      {nullptr, nullptr, dequantize<V, 2>, dequantize<V, 3>, dequantize<V, 4>},
      {nullptr, nullptr, add<V, 2>, add<V, 3>, add<V, 4>},
      {nullptr, nullptr, add_block<V, 2, false>, add_block<V, 3, false>, add_block<V, 4, false>},
      {nullptr, nullptr, add_block<V, 2, true>, add_block<V, 3, true>, add_block<V, 4, true>},
      silu_mul<V>};
  return &table;
}

}  // namespace
}  // namespace rapidmoe
