// The vector trait of AVX-512 (F, BW, VL, DQ) with VNNI: see rows_simd.h. Included inside a target pragma.
#pragma once
#include "layout.h"

namespace rapidmoe {
namespace {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int64_t W = 16, kBytes = 64;
  static constexpr int kTokens = 4;       // tokens that share a row's unpacked codes
  static constexpr int kPanelTokens = 8;  // tokens that share a panel's codes in registers
  static constexpr int kSumTokens = 6, kSumVectors = 4;
  static constexpr bool kNarrowMac = false;

  static F set(float a) { return _mm512_set1_ps(a); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void put(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F clamp(F a, F low, F high) { return _mm512_max_ps(low, _mm512_min_ps(high, a)); }  // NaN stays
  static F nearest(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static F times_two_to(F a, F n) { return _mm512_scalef_ps(a, n); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }
  static F max_abs(F a, F b) { return _mm512_max_ps(_mm512_abs_ps(a), b); }  // NaN: keeps b
  // 1 / a, or 0 where a is too small for it (or NaN).
  static F inverse(F a) {
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(a, set(1e-37f), _CMP_GE_OQ), set(1), a);
  }

  static I zero() { return _mm512_setzero_si512(); }
  static I load(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static I load_part(const uint8_t* p, int64_t bytes) {
    return _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, p);
  }
  static I bits_of(F a) { return _mm512_castps_si512(a); }
  static void store(I a, uint8_t* p) { _mm512_storeu_si512(p, a); }
  // 8 bytes a group become 16: bit 2p of byte b says the high bit of code 16p + b.
  static I high(const uint8_t* p) {
    const I twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3),
                                             _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)));
    return _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 1, 0, 1, 0, 1, 0, 1));
  }
  template <int n>
  static I shift(I a) {
    return n < 0 ? _mm512_slli_epi16(a, n < 0 ? -n : 0) : _mm512_srli_epi16(a, n < 0 ? 0 : n);
  }
  template <int n>
  static I low_bits(I a) {
    return _mm512_and_si512(a, _mm512_set1_epi8((1 << n) - 1));
  }
  // Bits 0 and 1 of a, bit 2 of b.
  static I merge(I a, I b) {
    return low_bits<3>(_mm512_ternarylogic_epi32(_mm512_set1_epi8(3), a, b, 0xca));
  }
  static F widen(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
  }
  template <int planes>
  static F dot(const I* codes, const int8_t* q) {
    I total = zero();
    for (int p = 0; p < planes; ++p) total = _mm512_dpbusd_epi32(total, codes[p], load((const uint8_t*)q + 64 * p));
    return to_float(total);
  }
  // Groups i * groups ... of a, an equal share of the lanes each.
  template <int groups>
  static I spread(I a, int i) {
    const int g = i * groups;
    const I at = groups == 2 ? _mm512_setr_epi32(g, g, g, g, g, g, g, g, g + 1, g + 1, g + 1, g + 1, g + 1, g + 1, g + 1,
                                                 g + 1)
                             : _mm512_setr_epi32(g, g, g, g, g + 1, g + 1, g + 1, g + 1, g + 2, g + 2, g + 2, g + 2,
                                                 g + 3, g + 3, g + 3, g + 3);
    return _mm512_permutexvar_epi32(at, a);
  }
  template <int groups>
  static F spread(F a, int i) {
    return _mm512_castsi512_ps(spread<groups>(_mm512_castps_si512(a), i));
  }
  // Dwords of byte j of the four rows: bytes 8 half .. 8 half + 3 of each lane, and the next four.
  static void interleave(int half, I a, I b, I c, I d, I* first, I* second) {
    const I ab = half ? _mm512_unpackhi_epi8(a, b) : _mm512_unpacklo_epi8(a, b);
    const I cd = half ? _mm512_unpackhi_epi8(c, d) : _mm512_unpacklo_epi8(c, d);
    *first = _mm512_unpacklo_epi16(ab, cd), *second = _mm512_unpackhi_epi16(ab, cd);
  }
  static I mac(I total, I codes, I k) { return _mm512_dpbusd_epi32(total, codes, k); }
  static I finish(I total) { return total; }
  static I add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I broadcast4(const int8_t* p) {
    int32_t four;
    __builtin_memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
  }
  // Dword j of vector i and dword i of vector j change places, within each lane.
  static void transpose_dwords(I* a) {
    const I b0 = _mm512_unpacklo_epi32(a[0], a[1]), b1 = _mm512_unpackhi_epi32(a[0], a[1]);
    const I b2 = _mm512_unpacklo_epi32(a[2], a[3]), b3 = _mm512_unpackhi_epi32(a[2], a[3]);
    a[0] = _mm512_unpacklo_epi64(b0, b2), a[1] = _mm512_unpackhi_epi64(b0, b2);
    a[2] = _mm512_unpacklo_epi64(b1, b3), a[3] = _mm512_unpackhi_epi64(b1, b3);
  }
  static void store_lane(I a, int lane, uint8_t* p) {
    const __m128i part = lane == 0   ? _mm512_castsi512_si128(a)
                         : lane == 1 ? _mm512_extracti32x4_epi32(a, 1)
                         : lane == 2 ? _mm512_extracti32x4_epi32(a, 2)
                                     : _mm512_extracti32x4_epi32(a, 3);
    _mm_storeu_si128((__m128i*)p, part);
  }
  static I add128(I high, I low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 7), low); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I round(F a) { return _mm512_cvtps_epi32(a); }
  // a becomes its nearest multiple of 128, in units of that; returns what is left, -64 .. 63.
  static I split128(I* a) {
    const I whole = _mm512_srai_epi32(_mm512_add_epi32(*a, _mm512_set1_epi32(64)), 7);
    const I rest = _mm512_sub_epi32(*a, _mm512_slli_epi32(whole, 7));
    *a = whole;
    return rest;
  }
  static I pack4(const I* a) {
    const I byte = _mm512_set1_epi32(255);
    const I low = _mm512_or_si512(_mm512_and_si512(a[0], byte), _mm512_slli_epi32(_mm512_and_si512(a[1], byte), 8));
    const I high = _mm512_or_si512(_mm512_slli_epi32(_mm512_and_si512(a[2], byte), 16), _mm512_slli_epi32(a[3], 24));
    return _mm512_or_si512(low, high);
  }
  // Lane l of vectors 0-3 becomes vector l.
  static void transpose(F* a) {
    const F b0 = _mm512_shuffle_f32x4(a[0], a[1], 0x44), b1 = _mm512_shuffle_f32x4(a[2], a[3], 0x44);
    const F b2 = _mm512_shuffle_f32x4(a[0], a[1], 0xee), b3 = _mm512_shuffle_f32x4(a[2], a[3], 0xee);
    a[0] = _mm512_shuffle_f32x4(b0, b1, 0x88), a[1] = _mm512_shuffle_f32x4(b0, b1, 0xdd);
    a[2] = _mm512_shuffle_f32x4(b2, b3, 0x88), a[3] = _mm512_shuffle_f32x4(b2, b3, 0xdd);
  }
  static F halves(const uint16_t* h, int64_t n) {
    const __mmask16 part = n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1);
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(part, h));
  }
  static void quantize(const float* x, int64_t d, int8_t* q, float* scale, float* sum_out) {
    for (int64_t g = 0; g < d / kGroup; ++g, x += kGroup, q += kGroup) {
      F largest = set(0), poison = set(0);
      for (int64_t e = 0; e < kGroup; e += W) {
        poison = fma(load(x + e), set(0), poison);
        largest = _mm512_max_ps(_mm512_abs_ps(load(x + e)), largest);  // NaN: keeps the second
      }
      const float step = _mm512_reduce_max_ps(largest) / 127.0f, bad = sum(poison);
      const float inverse = step >= 1e-37f && bad == 0 ? 1.0f / step : 0.0f;
      __m512i total = _mm512_setzero_si512();
      for (int64_t e = 0; e < kGroup; e += W) {
        const F scaled = inverse == 0.0f ? set(0) : _mm512_mul_ps(load(x + e), set(inverse));
        const __m512i i32 = _mm512_cvtps_epi32(scaled);
        total = _mm512_add_epi32(total, i32);
        _mm_storeu_si128((__m128i*)(q + e), _mm512_cvtsepi32_epi8(i32));
      }
      scale[g] = step + bad;
      sum_out[g] = scale[g] * float(_mm512_reduce_add_epi32(total));
    }
  }
};

}  // namespace
}  // namespace rapidmoe
