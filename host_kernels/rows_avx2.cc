// Row kernels for AVX2 + FMA + F16C. std headers come before the pragma, so that none of their inline
// functions is compiled for a newer processor than the one that may run them.
#include <cmath>
#include <cstdint>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx2,fma,f16c")
#include "rows_simd.h"

namespace rapidmoe {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int64_t W = 8;
  struct Codes {
    __m256i low, high;  // codes 0-31 and 32-63, a byte each
  };

  static F set(float a) { return _mm256_set1_ps(a); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void put(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }

  static Codes unpack4(const uint8_t* p) {
    const __m256i packed = _mm256_loadu_si256((const __m256i*)p), mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(packed, mask), _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask)};
  }
  static Codes unpack2(const uint8_t* p) {
    const __m256i packed = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
    const __m256i mask = _mm256_set1_epi8(3);
    const __m256i first = _mm256_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2), last = _mm256_setr_epi32(4, 4, 4, 4, 6, 6, 6, 6);
    return {_mm256_and_si256(_mm256_srlv_epi32(packed, first), mask),
            _mm256_and_si256(_mm256_srlv_epi32(packed, last), mask)};
  }
  // 0 or 4 a code: the high plane of a 3-bit row in place.
  static Codes unpack1(const uint8_t* p) {
    const __m256i packed = _mm256_set1_epi64x(*(const int64_t __attribute__((aligned(1), may_alias))*)p);
    const __m256i four = _mm256_set1_epi8(4);
    const __m256i first = _mm256_setr_epi32(0x01010101, 0x01010101, 0x02020202, 0x02020202, 0x04040404, 0x04040404,
                                            0x08080808, 0x08080808);
    const __m256i last = _mm256_slli_epi16(first, 4);
    return {_mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(packed, first), first), four),
            _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(packed, last), last), four)};
  }
  template <int bits>
  static Codes unpack(const uint8_t* codes, int64_t d, int64_t g) {
    if constexpr (bits == 4) return unpack4(codes + g * 32);
    const Codes two = unpack2(codes + g * 16);
    if constexpr (bits == 2) return two;
    const Codes one = unpack1(codes + row_bytes(2, d) + g * 8);
    return {_mm256_or_si256(two.low, one.low), _mm256_or_si256(two.high, one.high)};
  }
  static void store(const Codes& c, uint8_t* p) {
    _mm256_store_si256((__m256i*)p, c.low);
    _mm256_store_si256((__m256i*)(p + 32), c.high);
  }
  static F widen(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
  }
  // Codes are at most 15, so four products of 15 * 127 fit int16.
  static F dot(const Codes& c, const int8_t* q) {
    const __m256i low = _mm256_maddubs_epi16(c.low, _mm256_loadu_si256((const __m256i*)q));
    const __m256i high = _mm256_maddubs_epi16(c.high, _mm256_loadu_si256((const __m256i*)(q + 32)));
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1)));
  }
  // int16 sums of columns 0-7 and 16-23, 8-15 and 24-31, 32-39 and 48-55, 40-47 and 56-63.
  struct Sums {
    __m256i a, b, c, d;
  };
  static Sums clear() {
    const __m256i zero = _mm256_setzero_si256();
    return {zero, zero, zero, zero};
  }
  // 16 rows of codes up to 15 times int8 up to 127 stay within 30480: no int16 overflow.
  static void add_pair(Sums& s, const Codes& even, const Codes& odd, uint16_t pair) {
    const __m256i k = _mm256_set1_epi16(short(pair));
    s.a = _mm256_add_epi16(s.a, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(even.low, odd.low), k));
    s.b = _mm256_add_epi16(s.b, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(even.low, odd.low), k));
    s.c = _mm256_add_epi16(s.c, _mm256_maddubs_epi16(_mm256_unpacklo_epi8(even.high, odd.high), k));
    s.d = _mm256_add_epi16(s.d, _mm256_maddubs_epi16(_mm256_unpackhi_epi8(even.high, odd.high), k));
  }
  static void flush(const Sums& s, float step, float shift, float* acc) {
    const F scale = set(step), offset = set(shift);
    const auto eight = [&](__m128i sums, float* out) {
      put(out, add(load(out), fma(_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(sums)), scale, offset)));
    };
    const auto sixteen = [&](__m256i sums, float* out) {
      eight(_mm256_castsi256_si128(sums), out);
      eight(_mm256_extracti128_si256(sums, 1), out + 16);
    };
    sixteen(s.a, acc);
    sixteen(s.b, acc + 8);
    sixteen(s.c, acc + 32);
    sixteen(s.d, acc + 40);
  }
  static void halves(const uint16_t* h, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) put(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(h + i))));
    for (; i < n; ++i) out[i] = _cvtsh_ss(h[i]);
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
  static const bool have =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return have ? simd_table<Avx2>("avx2") : nullptr;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_avx2() { return nullptr; }
}  // namespace rapidmoe
#endif
