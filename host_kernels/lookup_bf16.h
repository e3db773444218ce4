// Packed rows as bfloat16: the 4, 8 or 16 weights that a group can have are worked out once and looked up by code, in
// one permutation of 32 words a half group. Included inside a target pragma with AVX512_VBMI and AVX512_BF16.
#pragma once

#include "avx512.h"
#include "rows_simd.h"

namespace rapidmoe {
namespace {

// Which column of a half group its word w holds.
struct PlainOrder {
  static constexpr int column(int w) { return w; }
};
// unpacklo and unpackhi (words) of two rows in this order are pairs of columns 0-15 and 16-31.
struct PairOrder {
  static constexpr int column(int w) { return w % 8 / 4 * 16 + w / 8 * 4 + w % 4; }
};

// How to bring the codes of a group to the low bits of words; a lookup reads no more than the low five. Both halves come
// from the same bytes: after `shift` to the right the second half's codes stand four bits above the first one's.
template <class Order>
struct WordOf {
  alignas(64) uint8_t nibbles[64] = {}, pairs[64] = {}, bits[64] = {};
  alignas(64) uint16_t shift[32] = {}, bit_shift[32] = {};
  constexpr WordOf() {
    for (int w = 0; w < 32; ++w) {
      const int c = Order::column(w);
      nibbles[2 * w] = uint8_t(c), pairs[2 * w] = uint8_t(c % 16), bits[2 * w] = uint8_t(c % 8);
      shift[w] = uint16_t(c / 16 * 2), bit_shift[w] = uint16_t(c / 8);
    }
  }
};
template <class Order>
constexpr WordOf<Order> kWordOf{};

// The codes that the entries of a lookup stand for. 3 bits: entry bits 0, 1 and 4, the others are of neighbouring codes.
template <int bits>
struct EntryCodes {
  alignas(64) float code[32] = {};
  constexpr EntryCodes() {
    for (int i = 0; i < 32; ++i) code[i] = float(bits == 4 ? i % 16 : bits == 2 ? i % 4 : i % 4 + i / 16 * 4);
  }
};
template <int bits>
constexpr EntryCodes<bits> kEntryCodes{};

// Groups first .. last - 1 (16 at most) of one row.
template <int bits, class Order>
class Halves {
 public:
  Halves(const Row& row, int64_t groups, int64_t first, int64_t last) : row_(row), groups_(groups), first_(first) {
    __m512 scale, offset;
    load_scales<Avx512, bits>(row, first, last - first, &scale, &offset);
    _mm512_store_ps(scale_, scale), _mm512_store_ps(offset_, offset);
    constexpr int64_t kBytes = bits == 4 ? 32 : 16;
    for (int64_t b = first * kBytes; b < last * kBytes; b += 64) fetch(row.codes + b, row.ahead);
    if (bits == 3) fetch(row.codes + groups * 16 + first * 8, row.ahead);
  }
  // Columns 0-31 and 32-63 of a group, rounded to nearest.
  void of(int64_t g, __m512i* low, __m512i* high) const {
    const auto& word = kWordOf<Order>;
    const __m512 s = _mm512_set1_ps(scale_[g - first_]), o = _mm512_set1_ps(offset_[g - first_]);
    const __m512 some = _mm512_fmadd_ps(s, _mm512_load_ps(kEntryCodes<bits>.code), o);
    const __m512 more = bits == 3 ? _mm512_fmadd_ps(s, _mm512_load_ps(kEntryCodes<bits>.code + 16), o) : some;
    const __m512i weights = (__m512i)_mm512_cvtne2ps_pbh(more, some);
    const uint8_t* codes = row_.codes + g * (bits == 4 ? 32 : 16);
    __m512i a, b;
    if constexpr (bits == 4) {
      const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)codes));
      a = _mm512_permutexvar_epi8(_mm512_load_si512(word.nibbles), bytes);
    } else {
      const __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)codes));
      a = _mm512_srlv_epi16(_mm512_permutexvar_epi8(_mm512_load_si512(word.pairs), bytes), _mm512_load_si512(word.shift));
    }
    b = _mm512_srli_epi16(a, 4);
    if constexpr (bits == 3) {
      const __m512i bytes = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)(row_.codes + groups_ * 16 + g * 8)));
      const __m512i top = _mm512_srlv_epi16(_mm512_permutexvar_epi8(_mm512_load_si512(word.bits), bytes),
                                            _mm512_load_si512(word.bit_shift));
      const __m512i bit4 = _mm512_set1_epi16(16);
      a = _mm512_ternarylogic_epi32(bit4, _mm512_slli_epi16(top, 4), a, 0xca);  // bit 4 of top, the others of a
      b = _mm512_ternarylogic_epi32(bit4, top, b, 0xca);
    }
    *low = _mm512_permutexvar_epi16(a, weights), *high = _mm512_permutexvar_epi16(b, weights);
  }

 private:
  const Row& row_;
  int64_t groups_, first_;
  alignas(64) float scale_[16], offset_[16];
};

// a + b, words of bfloat16, rounded to nearest (ties away from zero).
inline __m512i add_bf16(__m512i a, __m512i b) {
  const __m512i top = _mm512_set1_epi32(int(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  const __m512 odd = _mm512_add_ps((__m512)_mm512_and_si512(a, top), (__m512)_mm512_and_si512(b, top));
  const __m512 even = _mm512_add_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16));
  const __m512i high = _mm512_add_epi32((__m512i)odd, half), low = _mm512_add_epi32((__m512i)even, half);
  return _mm512_ternarylogic_epi32(top, high, _mm512_srli_epi32(low, 16), 0xca);
}

// Calls body with std::integral_constant<int, bits>, bits 2, 3 or 4.
template <class Body>
inline void with_bits(int bits, Body body) {
  if (bits == 2)
    body(std::integral_constant<int, 2>());
  else if (bits == 3)
    body(std::integral_constant<int, 3>());
  else
    body(std::integral_constant<int, 4>());
}

}  // namespace
}  // namespace rapidmoe
