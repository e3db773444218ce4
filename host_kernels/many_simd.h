// Rows against many tokens: see rows_simd.h. Included by the same files.
//
// Sixteen rows are unpacked once into a panel: byte [group][k / 4][row][k % 4], so that one vector holds four
// consecutive codes of every row and meets four codes of a token, broadcast.
#pragma once
#include "weights_simd.h"

namespace rapidmoe {
namespace {

constexpr int64_t kPanelRows = 16;

// Codes, scales [group][row] and offsets [group][row] of up to 16 rows; what is missing repeats the last row.
struct Panel {
  uint8_t* codes;
  float *scale, *offset;
};

// A panel for rows of width d in this thread's scratch memory, good until the next call.
inline Panel panel_memory(int64_t d) {
  struct Memory {
    int64_t width = 0;
    uint8_t* data = nullptr;
    ~Memory() { std::free(data); }
  };
  thread_local Memory memory;
  if (memory.width < d) {
    std::free(memory.data);
    memory.data = nullptr, memory.width = 0;
    if (posix_memalign((void**)&memory.data, 64, size_t(d * kPanelRows + d / kGroup * kPanelRows * 8)))
      throw std::bad_alloc();
    memory.width = d;
  }
  float* scale = (float*)(memory.data + d * kPanelRows);
  return {memory.data, scale, scale + d / kGroup * kPanelRows};
}

template <class V, int bits>
inline void fill_panel(const Row* rows, int64_t count, int64_t d, const Panel& panel) {
  using C = Chunk<V, bits>;
  using I = typename V::I;
  constexpr int kRun = 8 * C::kPlane;
  const int64_t groups = d / kGroup;
  for (int64_t r = 0; r < kPanelRows; r += 4)
    for (int64_t g0 = 0; g0 < groups; g0 += V::W) {
      const int64_t n = groups - g0 < V::W ? groups - g0 : V::W;
      typename V::F scale[4], offset[4];
      for (int64_t i = 0; i < 4; ++i)
        load_scales<V, bits>(rows[r + i < count ? r + i : count - 1], g0, n, &scale[i], &offset[i]);
      for (int which = 0; which < 2; ++which) {
        I dword[4];
        for (int i = 0; i < 4; ++i) dword[i] = V::bits_of(which ? offset[i] : scale[i]);
        V::transpose_dwords(dword);
        float* out = (which ? panel.offset : panel.scale) + g0 * kPanelRows + r;
        for (int64_t i = 0; i < n; ++i) V::store_lane(dword[i % 4], int(i / 4), (uint8_t*)(out + i * kPanelRows));
      }
    }
  for (int64_t r = 0; r < kPanelRows; r += 4)
    for (int64_t c = 0; c * C::kGroups < groups; ++c) {
      I planes[4][C::kPlanes];
      for (int64_t i = 0; i < 4; ++i)
        unpack<V, bits>(load_chunk<V, bits>(rows[r + i < count ? r + i : count - 1], groups, c), planes[i]);
      for (int p = 0; p < C::kPlanes; ++p) {
        I dword[4] = {planes[0][p], planes[1][p], planes[2][p], planes[3][p]};
        V::transpose_dwords(dword);  // lane l of dword[i]: dword i of lane l, of four rows
        for (int lane = 0; lane < V::kBytes / 16; ++lane) {
          const int64_t group = c * C::kGroups + lane * 16 / kRun;
          if (group >= groups) break;
          const int64_t k4 = p * kRun / 4 + lane * 16 % kRun / 4;
          for (int i = 0; i < 4; ++i)
            V::store_lane(dword[i], lane, panel.codes + ((group * 16 + k4 + i) * kPanelRows + r) * 4);
        }
      }
    }
}

// out[i][row] for N tokens from t0 on.
template <class V, int bits, int N>
inline void dot_panel(const Panel& panel, int64_t d, const Activation* const* x, float* const* out) {
  using F = typename V::F;
  using I = typename V::I;
  constexpr int kHalves = int(kPanelRows / V::W);  // vectors to hold a value a row
  F total[N][kHalves];
  for (int t = 0; t < N; ++t)
    for (int h = 0; h < kHalves; ++h) total[t][h] = V::set(0);
  for (int64_t g = 0; g < d / kGroup; ++g) {
    const uint8_t* codes = panel.codes + g * 16 * kPanelRows * 4;
    I sum[N][kHalves], wide[N][kHalves];
    for (int t = 0; t < N; ++t)
      for (int h = 0; h < kHalves; ++h) sum[t][h] = V::zero();
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      I w[kHalves];
      for (int h = 0; h < kHalves; ++h) w[h] = V::load(codes + (k * kHalves + h) * V::kBytes);
      for (int t = 0; t < N; ++t) {
        const I q = V::broadcast4(x[t]->q + g * kGroup + 4 * k);
        for (int h = 0; h < kHalves; ++h) sum[t][h] = V::mac(sum[t][h], w[h], q);
      }
      if (bits == 4 && V::kNarrowMac && k == 7)  // the int16 sums are full
        for (int t = 0; t < N; ++t)
          for (int h = 0; h < kHalves; ++h) wide[t][h] = V::finish(sum[t][h]), sum[t][h] = V::zero();
    }
    for (int h = 0; h < kHalves; ++h) {
      const F scale = V::load(panel.scale + g * kPanelRows + h * V::W);
      const F offset = V::load(panel.offset + g * kPanelRows + h * V::W);
      for (int t = 0; t < N; ++t) {
        I all = V::finish(sum[t][h]);
        if (bits == 4 && V::kNarrowMac) all = V::add32(all, wide[t][h]);
        total[t][h] = V::fma(V::to_float(all), V::mul(scale, V::set(x[t]->scale[g])), total[t][h]);
        total[t][h] = V::fma(offset, V::set(x[t]->sum[g]), total[t][h]);
      }
    }
  }
  for (int t = 0; t < N; ++t)
    for (int h = 0; h < kHalves; ++h) V::put(out[t] + h * V::W, total[t][h]);
}

// Calls body(panel, rows in it, first row) over blocks of 16 rows.
template <class V, int bits, class Body>
inline void for_panels(const Row* rows, int64_t count, int64_t d, Body body) {
  const Panel panel = panel_memory(d);
  for (int64_t r = 0; r < count; r += kPanelRows) {
    const int64_t left = count - r < kPanelRows ? count - r : kPanelRows;
    fill_panel<V, bits>(rows + r, left, d, panel);
    body(panel, left, r);
  }
}

template <class V, int bits>
void dot_many(const Row* rows, int64_t count, int64_t d, int64_t n, const Activation* const* x, float* const* out) {
  for_panels<V, bits>(rows, count, d, [&](const Panel& panel, int64_t left, int64_t r) {
    constexpr int N = V::kPanelTokens;
    float rest[N][kPanelRows];
    for (int64_t t = 0; t < n; t += N) {
      float* to[N];
      const Activation* from[N];
      for (int64_t i = 0; i < N; ++i) {
        from[i] = x[t + i < n ? t + i : n - 1];
        to[i] = t + i < n && left == kPanelRows ? out[t + i] + r : rest[i];
      }
      dot_panel<V, bits, N>(panel, d, from, to);
      for (int64_t i = 0; i < N && t + i < n; ++i)
        if (to[i] == rest[i]) __builtin_memcpy(out[t + i] + r, rest[i], size_t(left) * 4);
    }
  });
}

// w = the weights of rows[r] + more.rows[r] in the columns of groups first .. last - 1.
template <class V, int bits>
inline void strip_of(const Row& row, const More& more, int64_t r, int64_t d, int64_t first, int64_t last, float* w) {
  float* const from = w - first * kGroup;
  for_weights<V, bits>(row, 1.0f, d, first, last, [&](int64_t i, typename V::F value) { V::put(from + i, value); });
  if (!more.rows) return;
  const auto add = [&](int64_t i, typename V::F value) { V::put(from + i, V::add(V::load(from + i), value)); };
  if (more.bits == 2)
    for_weights<V, 2>(more.rows[r], 1.0f, d, first, last, add);
  else if (more.bits == 3)
    for_weights<V, 3>(more.rows[r], 1.0f, d, first, last, add);
  else
    for_weights<V, 4>(more.rows[r], 1.0f, d, first, last, add);
}

constexpr int64_t kStripRows = 32;  // rows that sum_many dequantises at a time

template <class V, int N>
inline void sum_columns(const float* w, int64_t rows, const float* coefficients, int64_t stride, int64_t c,
                        float* const* out) {
  constexpr int kVectors = V::kSumVectors;
  typename V::F total[N][kVectors];
  for (int t = 0; t < N; ++t)
    for (int v = 0; v < kVectors; ++v) total[t][v] = V::load(out[t] + c + v * V::W);
  for (int64_t r = 0; r < rows; ++r) {
    typename V::F weight[kVectors];
    for (int v = 0; v < kVectors; ++v) weight[v] = V::load(w + r * kStrip * kGroup + c + v * V::W);
    for (int t = 0; t < N; ++t) {
      const typename V::F a = V::set(coefficients[t * stride + r]);
      for (int v = 0; v < kVectors; ++v) total[t][v] = V::fma(a, weight[v], total[t][v]);
    }
  }
  for (int t = 0; t < N; ++t)
    for (int v = 0; v < kVectors; ++v) V::put(out[t] + c + v * V::W, total[t][v]);
}

template <class V, int bits>
void sum_many(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
              const float* coefficients, int64_t stride, float* const* out) {
  alignas(64) float w[kStripRows * kStrip * kGroup];
  const int64_t groups = d / kGroup, last = first + kStrip < groups ? first + kStrip : groups;
  constexpr int N = V::kSumTokens;
  for (int64_t r0 = 0; r0 < count; r0 += kStripRows) {
    const int64_t left = count - r0 < kStripRows ? count - r0 : kStripRows;
    for (int64_t r = 0; r < left; ++r)
      strip_of<V, bits>(rows[r0 + r], more, r0 + r, d, first, last, w + r * kStrip * kGroup);
    for (int64_t c = 0; c < (last - first) * kGroup; c += V::kSumVectors * V::W) {
      int64_t t = 0;
      for (; n - t >= N; t += N) sum_columns<V, N>(w, left, coefficients + t * stride + r0, stride, c, out + t);
      for (; n - t >= 2; t += 2) sum_columns<V, 2>(w, left, coefficients + t * stride + r0, stride, c, out + t);
      for (; t < n; ++t) sum_columns<V, 1>(w, left, coefficients + t * stride + r0, stride, c, out + t);
    }
  }
}

}  // namespace
}  // namespace rapidmoe
