// Row kernels for AVX-512 (F, BW, VL, DQ) with VNNI. See rows_avx2.cc for the order of the includes.
#include <cmath>
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "rows_simd.h"

namespace rapidmoe {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int64_t W = 16;
  using Codes = __m512i;  // 64 codes, a byte each

  static F set(float a) { return _mm512_set1_ps(a); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void put(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(F a) { return _mm512_reduce_add_ps(a); }

  static Codes unpack4(const uint8_t* p) {
    const __m256i packed = _mm256_loadu_si256((const __m256i*)p);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
  }
  static Codes unpack2(const uint8_t* p) {
    const __m512i packed = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
    const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    return _mm512_and_si512(_mm512_srlv_epi32(packed, shift), _mm512_set1_epi8(3));
  }
  // 0 or 4 a code: the high plane of a 3-bit row in place.
  static Codes unpack1(const uint8_t* p) {
    const __m512i packed = _mm512_set1_epi64(*(const int64_t __attribute__((aligned(1), may_alias))*)p);
    const __m512i bit = _mm512_setr_epi64(0x0101010101010101, 0x0202020202020202, 0x0404040404040404,
                                          0x0808080808080808, 0x1010101010101010, 0x2020202020202020,
                                          0x4040404040404040, int64_t(0x8080808080808080));
    return _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(packed, bit), _mm512_set1_epi8(4));
  }
  template <int bits>
  static Codes unpack(const uint8_t* codes, int64_t d, int64_t g) {
    if constexpr (bits == 4) return unpack4(codes + g * 32);
    const Codes two = unpack2(codes + g * 16);
    if constexpr (bits == 2) return two;
    return _mm512_or_si512(two, unpack1(codes + row_bytes(2, d) + g * 8));
  }
  static void store(const Codes& c, uint8_t* p) { _mm512_store_si512(p, c); }
  static F widen(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)p)));
  }
  static F dot(const Codes& c, const int8_t* q) {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), c, _mm512_loadu_si512(q)));
  }
  // int16 sums of columns 16i .. 16i + 7 and 16i + 8 .. 16i + 15, i = 0..3 by 128-bit lane.
  struct Sums {
    __m512i low, high;
  };
  static Sums clear() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  // 16 rows of codes up to 15 times int8 up to 127 stay within 30480: no int16 overflow.
  static void add_pair(Sums& s, const Codes& even, const Codes& odd, uint16_t pair) {
    const __m512i k = _mm512_set1_epi16(short(pair));
    s.low = _mm512_add_epi16(s.low, _mm512_maddubs_epi16(_mm512_unpacklo_epi8(even, odd), k));
    s.high = _mm512_add_epi16(s.high, _mm512_maddubs_epi16(_mm512_unpackhi_epi8(even, odd), k));
  }
  static void flush(const Sums& s, float step, float shift, float* acc) {
    const F scale = set(step), offset = set(shift);
    const auto sixteen = [&](__m128i low, __m128i high, float* out) {
      const F sums = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_set_m128i(high, low)));
      put(out, add(load(out), fma(sums, scale, offset)));
    };
    sixteen(_mm512_extracti32x4_epi32(s.low, 0), _mm512_extracti32x4_epi32(s.high, 0), acc);
    sixteen(_mm512_extracti32x4_epi32(s.low, 1), _mm512_extracti32x4_epi32(s.high, 1), acc + 16);
    sixteen(_mm512_extracti32x4_epi32(s.low, 2), _mm512_extracti32x4_epi32(s.high, 2), acc + 32);
    sixteen(_mm512_extracti32x4_epi32(s.low, 3), _mm512_extracti32x4_epi32(s.high, 3), acc + 48);
  }
  static void halves(const uint16_t* h, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
      const __mmask16 m = n - i >= 16 ? __mmask16(0xffff) : __mmask16((1u << (n - i)) - 1);
      _mm512_mask_storeu_ps(out + i, m, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, h + i)));
    }
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

const RowKernels* rows_avx512() {
  static const bool have = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c");
  return have ? simd_table<Avx512>("avx512") : nullptr;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_avx512() { return nullptr; }
}  // namespace rapidmoe
#endif
