// Both sides of sum_many in bfloat16 (AVX512_BF16, AMX_BF16): rows two by two, since both instructions multiply pairs.
// Included inside a target pragma.
#pragma once
#include "lookup_bf16.h"

namespace rapidmoe {
namespace {

constexpr int64_t kTile = 16;      // rows of a tile, and its columns in dwords
constexpr int64_t kSumPairs = 16;  // pairs of rows of a block: one tile's depth
constexpr int64_t kSumRows = 2 * kSumPairs;
constexpr int64_t kColumns = kStrip * kGroup;

inline int64_t whole_tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// Blocks of kSumRows rows, zero past the last row and token.
struct PairProduct {
  int64_t blocks = 0, columns = 0, padded = 0;
  uint32_t* weights;  // [blocks][tiles of 16 columns][16 pairs of rows][16 columns]
  uint16_t* factors;  // [blocks][padded tokens][32 rows]
  // The 16 pairs of rows of a block at columns c .. c + 15, for one tile and the tiles after it.
  const uint32_t* weight(int64_t block, int64_t c) const { return &weights[(block * kColumns + c) * kTile]; }
  const uint16_t* factor(int64_t block, int64_t token) const { return &factors[(block * padded + token) * kSumRows]; }

  // Memory for `count` rows, `times` over, and n tokens.
  void start(int64_t count, int64_t n, int64_t times) {
    blocks = (count + kSumRows - 1) / kSumRows, padded = whole_tiles(n) * kTile;
    weights = (uint32_t*)weights_.at_least(times * blocks * kTile * kColumns);
    factors = (uint16_t*)factors_.at_least(blocks * padded * kSumPairs);
  }

  // Weights of rows of groups first .. last - 1 go to the blocks from `block` on, or are added to what is there.
  template <int bits, bool add>
  void fill_weights(const Row* rows, int64_t count, int64_t d, int64_t first, int64_t last, int64_t block) {
    columns = (last - first) * kGroup;
    const auto put = [](uint32_t* to, __m512i value) {
      _mm512_storeu_si512(to, add ? add_bf16(_mm512_loadu_si512(to), value) : value);
    };
    for (int64_t pair = 0; pair < blocks * kSumPairs; ++pair) {
      uint32_t* to = &weights[(block + pair / kSumPairs) * kColumns * kTile + pair % kSumPairs * kTile];
      const int64_t r = 2 * pair;
      if (r >= count) {
        for (int64_t c = 0; c < columns && !add; c += kTile) put(to + c * kTile, _mm512_setzero_si512());
        continue;
      }
      const Halves<bits, PairOrder> even(rows[r], d / kGroup, first, last);
      const Halves<bits, PairOrder> odd(rows[std::min(r + 1, count - 1)], d / kGroup, first, last);
      const bool both = r + 1 < count;
      for (int64_t g = first; g < last; ++g, to += kGroup * kTile) {
        __m512i a[2], b[2] = {};
        even.of(g, &a[0], &a[1]);
        if (both) odd.of(g, &b[0], &b[1]);
        for (int i = 0; i < 2; ++i) {
          put(to + 2 * i * kTile * kTile, _mm512_unpacklo_epi16(a[i], b[i]));
          put(to + (2 * i + 1) * kTile * kTile, _mm512_unpackhi_epi16(a[i], b[i]));
        }
      }
    }
  }

  void fill_factors(int64_t count, int64_t n, const float* coefficients, int64_t stride) {
    for (int64_t b = 0; b < blocks; ++b)
      for (int64_t t = 0; t < padded; ++t) {
        __m512 half[2] = {};
        for (int64_t h = 0; h < 2 && t < n; ++h) {
          const int64_t r = b * kSumRows + h * kTile, left = count - r;
          if (left <= 0) continue;
          const __mmask16 part = left >= kTile ? __mmask16(0xffff) : __mmask16((1u << left) - 1);
          half[h] = _mm512_maskz_loadu_ps(part, coefficients + t * stride + r);
        }
        _mm512_storeu_si512(&factors[(b * padded + t) * kSumRows], (__m512i)_mm512_cvtne2ps_pbh(half[1], half[0]));
      }
  }

 private:
  Buffer weights_, factors_;
};

}  // namespace
}  // namespace rapidmoe
