// Products in bfloat16 (AVX512_BF16, AMX_BF16): rows two by two, since both instructions multiply pairs. Included
// inside a target pragma.
#pragma once
#include <vector>

#include "avx512.h"
#include "many_simd.h"

namespace rapidmoe {
namespace {

constexpr int64_t kTile = 16;  // rows of a tile, and its columns in dwords
constexpr int64_t kColumns = kStrip * kGroup;

inline int64_t whole_tiles(int64_t n) { return (n + kTile - 1) / kTile * kTile; }

// Two rows of 16 floats as bfloat16 pairs a column.
inline __m512i pair_up(const float* even, const float* odd) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(odd), _mm512_loadu_ps(even));
  alignas(64) static const uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(order), both);
}

// Both sides of sum_many in bfloat16, in blocks of kSumRows rows, zero past the last row and token.
struct PairProduct {
  int64_t blocks = 0, columns = 0, padded = 0;
  std::vector<uint32_t> weights;  // [blocks][tiles of 16 columns][16 pairs of rows][16 columns]
  std::vector<uint16_t> factors;  // [blocks][padded tokens][32 rows]
  // The 16 pairs of rows of a block at columns c .. c + 15, for one tile and the tiles after it.
  const uint32_t* weight(int64_t block, int64_t c) const { return &weights[(block * kColumns + c) * kTile]; }
  const uint16_t* factor(int64_t block, int64_t token) const { return &factors[(block * padded + token) * kSumRows]; }

  template <int bits>
  void fill(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n, const float* coefficients,
            int64_t stride) {
    const int64_t last = std::min(first + kStrip, d / kGroup);
    blocks = (count + kSumRows - 1) / kSumRows, columns = (last - first) * kGroup, padded = whole_tiles(n);
    if (int64_t(weights.size()) < blocks * kTile * kColumns) weights.resize(blocks * kTile * kColumns);
    if (int64_t(factors.size()) < blocks * padded * kSumRows) factors.resize(blocks * padded * kSumRows);
    alignas(64) float two[2][kColumns] = {};
    for (int64_t r = 0; r < blocks * kSumRows; ++r) {
      if (r < count) {
        strip_of<Avx512, bits>(rows[r], more, r, d, first, last, two[r % 2]);
      } else {
        std::memset(two[r % 2], 0, sizeof two[0]);
      }
      if (r % 2 == 0) continue;
      for (int64_t c = 0; c < columns; c += kTile)
        _mm512_storeu_si512(&weights[(r / kSumRows * kColumns + c) * kTile + r % kSumRows / 2 * kTile],
                            pair_up(two[0] + c, two[1] + c));
    }
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
};

}  // namespace
}  // namespace rapidmoe
