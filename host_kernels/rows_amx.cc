// The AVX-512 table with AMX tiles for many tokens: int8 tiles for dot products, bfloat16 tiles for sums. See
// rows_avx2.cc for the order of the includes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "rows.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16")
#include "avx512.h"
#include "pairs_bf16.h"

namespace rapidmoe {
namespace {

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

// Dword j of row i goes to at(j) + 4 i dwords' bytes, for 16 rows of 16 dwords.
template <class At>
inline void transpose16(const __m512i* rows, At at) {
  for (int i = 0; i < 4; ++i) {
    __m512i four[4] = {rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]};
    Avx512::transpose_dwords(four);
    for (int lane = 0; lane < 4; ++lane)
      for (int j = 0; j < 4; ++j) Avx512::store_lane(four[j], lane, (uint8_t*)at(4 * lane + j) + 16 * i);
  }
}

// Tokens in tiles of 16 as the right side of a product: q [tile][group][k / 4][token][k % 4], scale and sum
// [tile][group][token]. Tokens past the last repeat it.
struct TokenTiles {
  std::vector<int8_t> q;
  std::vector<float> scale, sum;
  void fill(int64_t d, int64_t n, const Activation* const* x) {
    const int64_t groups = d / kGroup, padded = whole_tiles(n);
    if (int64_t(q.size()) < padded * d) q.resize(padded * d), scale.resize(padded * groups), sum.resize(padded * groups);
    for (int64_t t0 = 0; t0 < padded; t0 += kTile) {
      const Activation* from[kTile];
      for (int64_t i = 0; i < kTile; ++i) from[i] = x[t0 + i < n ? t0 + i : n - 1];
      __m512i row[kTile];
      for (int64_t g = 0; g < groups; ++g) {
        for (int64_t i = 0; i < kTile; ++i) row[i] = _mm512_loadu_si512(from[i]->q + g * kGroup);
        int8_t* out = &q[t0 * d + g * kGroup * kTile];
        transpose16(row, [&](int64_t k) { return out + k * 64; });
      }
      for (int64_t g = 0; g < groups; g += 16) {
        const auto each = [&](float* out, auto field) {
          for (int64_t i = 0; i < kTile; ++i) row[i] = _mm512_loadu_si512(field(*from[i]) + g);
          alignas(64) float columns[16][kTile];
          transpose16(row, [&](int64_t j) { return columns[j]; });
          std::memcpy(out + t0 * groups + g * kTile, columns, size_t(std::min<int64_t>(16, groups - g) * kTile * 4));
        };
        each(scale.data(), [](const Activation& a) { return a.scale; });
        each(sum.data(), [](const Activation& a) { return a.sum; });
      }
    }
  }
};

// Sixteen rows as the left side: codes [group][row][64], scale and offset [row][group]. Missing rows repeat the last.
struct RowTiles {
  std::vector<uint8_t> codes;
  std::vector<float> scale, offset;
  template <int bits>
  void fill(const Row* rows, int64_t count, int64_t d) {
    using C = Chunk<Avx512, bits>;
    const int64_t groups = d / kGroup, stride = padded_width(d) / kGroup;
    codes.resize(padded_width(d) * kTile), scale.resize(stride * kTile), offset.resize(stride * kTile);
    for (int64_t r = 0; r < kTile; ++r) {
      const Row& row = rows[r < count ? r : count - 1];
      for (int64_t g = 0; g < groups; g += 16) {
        __m512 s, o;
        load_scales<Avx512, bits>(row, g, std::min<int64_t>(16, groups - g), &s, &o);
        _mm512_storeu_ps(&scale[r * stride + g], s), _mm512_storeu_ps(&offset[r * stride + g], o);
      }
      for (int64_t c = 0; c * C::kGroups < groups; ++c) {
        __m512i plane[C::kPlanes];
        unpack<Avx512, bits>(load_chunk<Avx512, bits>(row, groups, c), plane);
        uint8_t* out = &codes[(c * C::kGroups * kTile + r) * kGroup];
        if constexpr (bits == 4) {
          _mm512_storeu_si512(out, _mm512_shuffle_i64x2(plane[0], plane[1], 0x44));
          _mm512_storeu_si512(out + kGroup * kTile, _mm512_shuffle_i64x2(plane[0], plane[1], 0xee));
        } else {
          __m512 lanes[4];
          for (int i = 0; i < 4; ++i) lanes[i] = _mm512_castsi512_ps(plane[i]);
          Avx512::transpose(lanes);
          for (int i = 0; i < 4; ++i) _mm512_storeu_ps((float*)(out + i * kGroup * kTile), lanes[i]);
        }
      }
    }
  }
};

// Integer dot products of 16 rows with 16 tokens, for one group. Even and odd groups use tiles of their own.
// (The intrinsics want literal tile numbers.)
inline void multiply_group(const uint8_t* codes, const int8_t* q, int64_t g, int32_t* out) {
  codes += g * kGroup * kTile, q += g * kGroup * kTile;
  if (g % 2) {
    _tile_zero(0);
    _tile_loadd(1, codes, 64);
    _tile_loadd(2, q, 64);
    _tile_dpbusd(0, 1, 2);
    _tile_stored(0, out, 64);
  } else {
    _tile_zero(3);
    _tile_loadd(4, codes, 64);
    _tile_loadd(5, q, 64);
    _tile_dpbusd(3, 4, 5);
    _tile_stored(3, out, 64);
  }
}

// total[row], a lane a token, for one tile of rows and one of tokens.
inline void dot_tile(const RowTiles& rows, const TokenTiles& tokens, int64_t t0, int64_t d, __m512* total) {
  alignas(64) int32_t product[2][kTile * kTile];
  const int64_t groups = d / kGroup, stride = padded_width(d) / kGroup;
  const int8_t* q = &tokens.q[t0 * d];
  const float *scale = &tokens.scale[t0 * groups], *sum = &tokens.sum[t0 * groups];
  __m512 all[kTile];
  for (int r = 0; r < kTile; ++r) all[r] = _mm512_setzero_ps();
  multiply_group(rows.codes.data(), q, 0, product[0]);
  for (int64_t g = 0; g < groups; ++g) {
    // The tile unit works on the next group while the vector unit scales this one.
    if (g + 1 < groups) multiply_group(rows.codes.data(), q, g + 1, product[(g + 1) % 2]);
    const __m512 s = _mm512_loadu_ps(scale + g * kTile), m = _mm512_loadu_ps(sum + g * kTile);
    const float *row_scale = &rows.scale[g], *row_offset = &rows.offset[g];
#pragma GCC unroll 16
    for (int r = 0; r < kTile; ++r) {
      const __m512 whole = _mm512_cvtepi32_ps(_mm512_load_si512(product[g % 2] + r * kTile));
      all[r] = _mm512_fmadd_ps(whole, _mm512_mul_ps(s, _mm512_set1_ps(row_scale[r * stride])), all[r]);
      all[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(row_offset[r * stride]), all[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kTile; ++r) total[r] = all[r];
}

template <int bits>
void dot_tiles(const Row* rows, int64_t count, int64_t d, int64_t n, const Activation* const* x, float* const* out) {
  thread_local TokenTiles tokens;
  thread_local RowTiles block;
  tokens.fill(d, n, x);
  const Tiles tiles;
  for (int64_t r0 = 0; r0 < count; r0 += kTile) {
    const int64_t left = std::min(kTile, count - r0);
    block.fill<bits>(rows + r0, left, d);
    finish_writes();
    for (int64_t t = 0; t < n; t += kTile) {
      __m512 total[kTile];
      dot_tile(block, tokens, t, d, total);
      float rest[kTile][kTile];
      const bool whole = left == kTile && t + kTile <= n;
      transpose16((const __m512i*)total, [&](int64_t i) { return whole ? out[t + i] + r0 : rest[i]; });
      for (int64_t i = 0; i < kTile && t + i < n && !whole; ++i)
        std::memcpy(out[t + i] + r0, rest[i], size_t(left) * 4);
    }
  }
}

template <int bits>
void sum_tiles(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
               const float* coefficients, int64_t stride, float* const* out) {
  thread_local PairProduct product;
  product.fill<bits>(rows, more, count, d, first, n, coefficients, stride);
  finish_writes();
  const Tiles tiles;
  alignas(64) float sums[4][kTile * kTile];
  for (int64_t t = 0; t < n; t += kTile)
    for (int64_t c = 0; c < product.columns; c += 4 * kTile) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t b = 0; b < product.blocks; ++b) {
        const uint32_t* w = product.weight(b, c);
        _tile_loadd(4, product.factor(b, t), kSumRows * 2);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w + kTile * kTile, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, w + 2 * kTile * kTile, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, w + 3 * kTile * kTile, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      for (int64_t i = 0; i < kTile && t + i < n; ++i)
        for (int64_t v = 0; v < 4; ++v) {
          float* to = out[t + i] + c + v * kTile;
          _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(sums[v] + i * kTile)));
        }
    }
}

// Whether the processor has the tiles and the kernel grants this process their state.
bool have_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1 && d >> 24 & 1 && d >> 25 & 1)) return false;  // bf16, tile, int8
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace

const RowKernels* rows_amx() {
  static const RowKernels* const table = []() -> const RowKernels* {
    if (!rows_avx512_bf16() || !have_amx()) return nullptr;
    static RowKernels amx = *rows_avx512_bf16();
    amx.name = "amx";
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
