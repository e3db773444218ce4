// The AVX-512 table with AMX tiles for many tokens: everything in bfloat16. See rows_avx2.cc for the order of the
// includes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "buffer.h"
#include "rows.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c,amx-tile,amx-bf16")
#include "pairs_bf16.h"

namespace rapidmoe {
namespace {

constexpr int64_t kTileDwords = kTile * kTile;  // of a full tile: 1 KiB
constexpr int64_t kDepth = 8;                   // groups of columns that dot products take at a time
constexpr int64_t kSteps = kDepth * kGroup / 32;  // products of tiles in them

// Eight tiles of 16 x 64 bytes for this thread, while this object lives.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kTile;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// The intrinsics of tile loads do not tell the compiler that they read memory: what was written before stays before.
inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

// Four tiles of sums: left tiles 0 and 1 with right tiles 0 and 1; [left][right] at sums, `pitch` dwords from left to
// left. `steps` products each, tiles of the left side at left0 and left1 and of the right side at right0 and right1, one
// after the other. Without a second left or right tile the sums of it are left alone.
// (The intrinsics want literal tile numbers.)
struct Block {
  const void *left0, *left1, *right0, *right1;  // left1, right1: null = none
  int64_t left_step, right_step;                // bytes from one step to the next
};

template <bool left2, bool right2>
inline void multiply(const Block& block, int64_t steps, bool fresh, float* sums, int64_t pitch) {
  if (fresh) {
    _tile_zero(0);
    if (right2) _tile_zero(1);
    if (left2) _tile_zero(2);
    if (left2 && right2) _tile_zero(3);
  } else {
    _tile_loadd(0, sums, 64);
    if (right2) _tile_loadd(1, sums + kTileDwords, 64);
    if (left2) _tile_loadd(2, sums + pitch, 64);
    if (left2 && right2) _tile_loadd(3, sums + pitch + kTileDwords, 64);
  }
  for (int64_t i = 0; i < steps; ++i) {
    _tile_loadd(4, (const char*)block.left0 + i * block.left_step, 64);
    _tile_loadd(6, (const char*)block.right0 + i * block.right_step, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (right2) {
      _tile_loadd(7, (const char*)block.right1 + i * block.right_step, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (left2) {
      _tile_loadd(5, (const char*)block.left1 + i * block.left_step, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (right2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  if (right2) _tile_stored(1, sums + kTileDwords, 64);
  if (left2) _tile_stored(2, sums + pitch, 64);
  if (left2 && right2) _tile_stored(3, sums + pitch + kTileDwords, 64);
}

inline void multiply(const Block& block, int64_t steps, bool fresh, float* sums, int64_t pitch) {
  if (block.left1 && block.right1)
    multiply<true, true>(block, steps, fresh, sums, pitch);
  else if (block.left1)
    multiply<true, false>(block, steps, fresh, sums, pitch);
  else if (block.right1)
    multiply<false, true>(block, steps, fresh, sums, pitch);
  else
    multiply<false, false>(block, steps, fresh, sums, pitch);
}

// Dword j of row i goes to at(j) + i, for 16 rows of 16 dwords.
template <class At>
inline void transpose16(const __m512i* rows, At at) {
  __m512 lanes[4][4];  // [i / 4][j % 4]: rows 4 * (i / 4) .., a lane a j / 4
  for (int i = 0; i < 4; ++i) {
    __m512i four[4] = {rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]};
    Avx512::transpose_dwords(four);
    for (int j = 0; j < 4; ++j) lanes[j][i] = _mm512_castsi512_ps(four[j]);
  }
  for (int j = 0; j < 4; ++j) {
    Avx512::transpose(lanes[j]);
    for (int lane = 0; lane < 4; ++lane) _mm512_storeu_ps(at(4 * lane + j), lanes[j][lane]);
  }
}

// Sixteen tokens as right tiles, one a step: [step][pair of columns][token]; missing tokens repeat the last.
inline void pack_tokens(const Activation* const* x, int64_t n, int64_t column, int64_t steps, float* out) {
  for (int64_t s = 0; s < steps; ++s, out += kTileDwords) {
    __m512i row[kTile];
    for (int64_t i = 0; i < kTile; ++i) row[i] = _mm512_loadu_si512(x[std::min(i, n - 1)]->half + column + 32 * s);
    transpose16(row, [&](int64_t pair) { return out + pair * kTile; });
  }
}

// This thread's memory for dot_many.
struct DotMemory {
  Buffer tokens;  // [tiles of tokens][kSteps] tiles
  Buffer rows;    // [2][kSteps] tiles
  Buffer sums;    // [tiles of rows][tiles of tokens] tiles, [row][token] each
};

// 32 rows as left tiles, one a step: [tile][step][row][32 columns]. Of missing rows nothing is written.
template <int bits>
inline void unpack_rows(const Row* rows, int64_t count, int64_t groups, int64_t first, int64_t last, float* out) {
  for (int64_t r = 0; r < std::min(2 * kTile, count); ++r) {
    const Halves<bits, PlainOrder> halves(rows[r], groups, first, last);
    float* to = out + (r / kTile * kSteps * kTile + r % kTile) * kTile;
    for (int64_t g = first; g < last; ++g, to += 2 * kTileDwords) {
      __m512i low, high;
      halves.of(g, &low, &high);
      _mm512_storeu_si512(to, low), _mm512_storeu_si512(to + kTileDwords, high);
    }
  }
}

template <int bits>
void dot_tiles(const Row* rows, int64_t count, int64_t d, int64_t n, const Activation* const* x, float* const* out) {
  thread_local DotMemory memory;
  const int64_t groups = d / kGroup, across = whole_tiles(n), down = whole_tiles(count);
  float* const left = memory.rows.at_least(2 * kSteps * kTileDwords);
  float* const right = memory.tokens.at_least(across * kSteps * kTileDwords);
  float* const sums = memory.sums.at_least(across * down * kTileDwords);
  const Tiles tiles;
  for (int64_t first = 0; first < groups; first += kDepth) {
    const int64_t last = std::min(groups, first + kDepth), steps = (last - first) * kGroup / 32;
    for (int64_t t = 0; t < across; ++t)
      pack_tokens(x + t * kTile, n - t * kTile, first * kGroup, steps, right + t * kSteps * kTileDwords);
    for (int64_t r = 0; r < down; r += 2) {
      unpack_rows<bits>(rows + r * kTile, count - r * kTile, groups, first, last, left);
      finish_writes();
      for (int64_t t = 0; t < across; t += 2) {
        const float* some = right + t * kSteps * kTileDwords;
        const Block block = {left, r + 1 < down ? left + kSteps * kTileDwords : nullptr,
                             some, t + 1 < across ? some + kSteps * kTileDwords : nullptr, 1024, 1024};
        multiply(block, steps, first == 0, sums + (r * across + t) * kTileDwords, across * kTileDwords);
      }
    }
  }
  finish_writes();
  for (int64_t r = 0; r < down; ++r)
    for (int64_t t = 0; t < across; ++t) {
      __m512i row[kTile];
      for (int64_t i = 0; i < kTile; ++i)
        row[i] = _mm512_load_si512(sums + (r * across + t) * kTileDwords + i * kTile);
      const int64_t left = std::min(kTile, count - r * kTile);
      float rest[kTile][kTile];
      const bool whole = left == kTile && (t + 1) * kTile <= n;
      transpose16(row, [&](int64_t i) { return whole ? out[t * kTile + i] + r * kTile : rest[i]; });
      for (int64_t i = 0; i < kTile && t * kTile + i < n && !whole; ++i)
        std::memcpy(out[t * kTile + i] + r * kTile, rest[i], size_t(left) * 4);
    }
}

template <int bits>
void sum_tiles(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
               const float* coefficients, int64_t stride, float* const* out) {
  thread_local PairProduct product;
  const int64_t last = std::min(first + kStrip, d / kGroup), times = more.rows ? 2 : 1;
  product.start(count, n, times);
  product.fill_weights<bits, false>(rows, count, d, first, last, 0);
  if (more.rows)  // products of their own: cheaper than adding weights, but for a hundred tokens
    with_bits(more.bits,
              [&](auto b) { product.fill_weights<b(), false>(more.rows, count, d, first, last, product.blocks); });
  product.fill_factors(count, n, coefficients, stride);
  finish_writes();
  const Tiles tiles;
  alignas(64) float sums[2][2][kTileDwords];
  for (int64_t t = 0; t < n; t += 2 * kTile)
    for (int64_t c = 0; c < product.columns; c += 2 * kTile) {
      for (int64_t i = 0; i < times; ++i) {
        const uint16_t* left = product.factor(0, t);
        const uint32_t* right = product.weight(i * product.blocks, c);
        const Block block = {left, t + kTile < n ? left + kTile * kSumRows : nullptr, right, right + kTileDwords,
                             product.padded * kSumRows * 2, kColumns * kTile * 4};
        multiply(block, product.blocks, i == 0, sums[0][0], 2 * kTileDwords);
      }
      finish_writes();
      for (int64_t i = 0; i < 2 * kTile && t + i < n; ++i)
        for (int64_t v = 0; v < 2; ++v) {
          float* to = out[t + i] + c + v * kTile;
          const float* from = sums[i / kTile][v] + i % kTile * kTile;
          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(from)));
        }
    }
}

void round_bf16(const float* x, int64_t d, uint16_t* half) {
  for (int64_t i = 0; i < d; i += 32)
    _mm512_storeu_si512(half + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
}

// Whether the processor has the tiles and the kernel grants this process their state.
bool have_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1 && d >> 24 & 1)) return false;             // bf16, tile
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const RowKernels* rows_amx() {
  static const RowKernels* const table = []() -> const RowKernels* {
    if (!rows_avx512_bf16() || !have_amx()) return nullptr;
    static RowKernels amx = *rows_avx512_bf16();
    amx.name = "amx";
    amx.many = 4, amx.round = round_bf16;
    amx.dot_many[2] = dot_tiles<2>, amx.dot_many[3] = dot_tiles<3>, amx.dot_many[4] = dot_tiles<4>;
    amx.sum_many[2] = sum_tiles<2>, amx.sum_many[3] = sum_tiles<3>, amx.sum_many[4] = sum_tiles<4>;
    return &amx;
  }();
  return table;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_amx() { return nullptr; }
}  // namespace rapidmoe
#endif
