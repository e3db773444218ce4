// Row kernels for AVX2 + FMA + F16C. std headers come before the pragma, so that none of their inline
// functions is compiled for a newer processor than the one that may run them.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#include "table_simd.h"

namespace rapidmoe {
namespace {

struct Avx2 {
  using F = __m256;
  using I = __m256i;
  static constexpr int64_t W = 8, kBytes = 32;
  static constexpr int kTokens = 2;       // tokens that share a row's unpacked codes
  static constexpr int kPanelTokens = 3;  // tokens that share a panel's codes in registers
  static constexpr int kSumTokens = 3, kSumVectors = 4;
  static constexpr bool kNarrowMac = true;  // mac sums in int16

  static F set(float a) { return _mm256_set1_ps(a); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void put(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F clamp(F a, F low, F high) { return _mm256_max_ps(low, _mm256_min_ps(high, a)); }  // NaN stays
  static F nearest(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for -126 <= n <= 129.
  static F times_two_to(F a, F n) {
    const I half = _mm256_srai_epi32(_mm256_cvtps_epi32(n), 1), rest = _mm256_sub_epi32(_mm256_cvtps_epi32(n), half);
    const I one = _mm256_set1_epi32(127);
    const F first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
    return mul(mul(a, first), _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23)));
  }
  static float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static F max_abs(F a, F b) { return _mm256_max_ps(_mm256_andnot_ps(set(-0.0f), a), b); }  // NaN: keeps b
  // 1 / a, or 0 where a is too small for it (or NaN).
  static F inverse(F a) {
    return _mm256_and_ps(_mm256_div_ps(set(1), a), _mm256_cmp_ps(a, set(1e-37f), _CMP_GE_OQ));
  }

  static I zero() { return _mm256_setzero_si256(); }
  static I load(const uint8_t* p) { return _mm256_loadu_si256((const I*)p); }
  static I load_part(const uint8_t* p, int64_t bytes) {
    alignas(32) uint8_t part[32] = {};
    __builtin_memcpy(part, p, size_t(bytes));
    return _mm256_load_si256((const I*)part);
  }
  static I bits_of(F a) { return _mm256_castps_si256(a); }
  static void store(I a, uint8_t* p) { _mm256_storeu_si256((I*)p, a); }
  // 8 bytes a group become 16: bit 2p of byte b says the high bit of code 16p + b.
  static I high(const uint8_t* p) {
    const I twice = _mm256_permute4x64_epi64(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)), 0x50);
    return _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 1, 0, 1));
  }
  template <int n>
  static I shift(I a) {
    return n < 0 ? _mm256_slli_epi16(a, n < 0 ? -n : 0) : _mm256_srli_epi16(a, n < 0 ? 0 : n);
  }
  template <int n>
  static I low_bits(I a) {
    return _mm256_and_si256(a, _mm256_set1_epi8((1 << n) - 1));
  }
  // Bits 0 and 1 of a, bit 2 of b.
  static I merge(I a, I b) {
    return _mm256_or_si256(low_bits<2>(a), _mm256_and_si256(b, _mm256_set1_epi8(4)));
  }
  static F widen(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  // Sums of 4 planes of products stay within 4 * 2 * 7 * 127 and 2 * 2 * 15 * 127: no int16 overflow.
  template <int planes>
  static F dot(const I* codes, const int8_t* q) {
    I total = _mm256_maddubs_epi16(codes[0], load((const uint8_t*)q));
    for (int p = 1; p < planes; ++p)
      total = _mm256_add_epi16(total, _mm256_maddubs_epi16(codes[p], load((const uint8_t*)q + 32 * p)));
    return to_float(finish(total));
  }
  // Groups i * groups ... of a, one lane each (or both lanes).
  template <int groups>
  static I spread(I a, int i) {
    const I at = groups == 1 ? _mm256_set1_epi32(i) : _mm256_setr_epi32(2 * i, 2 * i, 2 * i, 2 * i, 2 * i + 1, 2 * i + 1,
                                                                        2 * i + 1, 2 * i + 1);
    return _mm256_permutevar8x32_epi32(a, at);
  }
  template <int groups>
  static F spread(F a, int i) {
    return _mm256_castsi256_ps(spread<groups>(_mm256_castps_si256(a), i));
  }
  // Dwords of byte j of the four rows: bytes 8 half .. 8 half + 3 of each lane, and the next four.
  static void interleave(int half, I a, I b, I c, I d, I* first, I* second) {
    const I ab = half ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b);
    const I cd = half ? _mm256_unpackhi_epi8(c, d) : _mm256_unpacklo_epi8(c, d);
    *first = _mm256_unpacklo_epi16(ab, cd), *second = _mm256_unpackhi_epi16(ab, cd);
  }
  // Two int16 sums a dword. 16 rows of codes up to 15 times int8 up to 127 stay within 30480: no overflow.
  static I mac(I total, I codes, I k) { return _mm256_add_epi16(total, _mm256_maddubs_epi16(codes, k)); }
  static I finish(I total) { return _mm256_madd_epi16(total, _mm256_set1_epi16(1)); }
  static I add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
  }
  // Dword j of vector i and dword i of vector j change places, within each lane.
  static void transpose_dwords(I* a) {
    const I b0 = _mm256_unpacklo_epi32(a[0], a[1]), b1 = _mm256_unpackhi_epi32(a[0], a[1]);
    const I b2 = _mm256_unpacklo_epi32(a[2], a[3]), b3 = _mm256_unpackhi_epi32(a[2], a[3]);
    a[0] = _mm256_unpacklo_epi64(b0, b2), a[1] = _mm256_unpackhi_epi64(b0, b2);
    a[2] = _mm256_unpacklo_epi64(b1, b3), a[3] = _mm256_unpackhi_epi64(b1, b3);
  }
  static void store_lane(I a, int lane, uint8_t* p) {
    _mm_storeu_si128((__m128i*)p, lane ? _mm256_extracti128_si256(a, 1) : _mm256_castsi256_si128(a));
  }
  static I add128(I high, I low) { return _mm256_add_epi32(_mm256_slli_epi32(high, 7), low); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I round(F a) { return _mm256_cvtps_epi32(a); }
  // a becomes its nearest multiple of 128, in units of that; returns what is left, -64 .. 63.
  static I split128(I* a) {
    const I whole = _mm256_srai_epi32(_mm256_add_epi32(*a, _mm256_set1_epi32(64)), 7);
    const I rest = _mm256_sub_epi32(*a, _mm256_slli_epi32(whole, 7));
    *a = whole;
    return rest;
  }
  static I pack4(const I* a) {
    const I byte = _mm256_set1_epi32(255);
    const I low = _mm256_or_si256(_mm256_and_si256(a[0], byte), _mm256_slli_epi32(_mm256_and_si256(a[1], byte), 8));
    const I high = _mm256_or_si256(_mm256_slli_epi32(_mm256_and_si256(a[2], byte), 16), _mm256_slli_epi32(a[3], 24));
    return _mm256_or_si256(low, high);
  }
  // Lane l of vectors 0-3 becomes vectors 2l, 2l + 1.
  static void transpose(F* a) {
    const F b0 = _mm256_permute2f128_ps(a[0], a[1], 0x20), b1 = _mm256_permute2f128_ps(a[2], a[3], 0x20);
    const F b2 = _mm256_permute2f128_ps(a[0], a[1], 0x31), b3 = _mm256_permute2f128_ps(a[2], a[3], 0x31);
    a[0] = b0, a[1] = b1, a[2] = b2, a[3] = b3;
  }
  static F halves(const uint16_t* h, int64_t n) {
    if (n >= W) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)h));
    alignas(16) uint16_t part[8] = {};
    __builtin_memcpy(part, h, size_t(n) * 2);
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i*)part));
  }
  static void quantize(const float* x, int64_t d, int8_t* q, float* scale, float* sum_out) {
    const F no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    for (int64_t g = 0; g < d / kGroup; ++g, x += kGroup, q += kGroup) {
      F largest = set(0), poison = set(0);
      for (int64_t e = 0; e < kGroup; e += W) {
        poison = fma(load(x + e), set(0), poison);
        largest = _mm256_max_ps(_mm256_and_ps(load(x + e), no_sign), largest);  // NaN: keeps the second
      }
      __m128 m = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
      m = _mm_max_ps(m, _mm_movehl_ps(m, m));
      const float step = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m))) / 127.0f, bad = sum(poison);
      const float inverse = step >= 1e-37f && bad == 0 ? 1.0f / step : 0.0f;
      __m256i total = _mm256_setzero_si256();
      for (int64_t e = 0; e < kGroup; e += W) {
        const F scaled = inverse == 0.0f ? set(0) : _mm256_mul_ps(load(x + e), set(inverse));
        const __m256i i32 = _mm256_cvtps_epi32(scaled);
        total = _mm256_add_epi32(total, i32);
        const __m128i i16 = _mm_packs_epi32(_mm256_castsi256_si128(i32), _mm256_extracti128_si256(i32, 1));
        _mm_storel_epi64((__m128i*)(q + e), _mm_packs_epi16(i16, i16));
      }
      scale[g] = step + bad;
      sum_out[g] = scale[g] * sum(_mm256_cvtepi32_ps(total));
    }
  }
};

}  // namespace

const RowKernels* rows_avx2() {
  // F16C is older than AVX2; not every compiler can ask for it.
  static const bool have = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return have ? simd_table<Avx2>("avx2") : nullptr;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_avx2() { return nullptr; }
}  // namespace rapidmoe
#endif
