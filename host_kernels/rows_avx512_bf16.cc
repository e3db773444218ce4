// The AVX-512 table with sums of many tokens in bfloat16. See rows_avx2.cc for the order of the includes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

#include "buffer.h"
#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi,avx512bf16,avx2,fma,f16c")
#include "pairs_bf16.h"

namespace rapidmoe {
namespace {

// out[t .. t + N - 1][c .. c + 63] += the product.
template <int N>
inline void multiply(const PairProduct& product, int64_t t, int64_t c, float* const* out) {
  __m512 total[N][4];
  for (int i = 0; i < N; ++i)
    for (int v = 0; v < 4; ++v) total[i][v] = _mm512_loadu_ps(out[t + i] + c + v * kTile);
  for (int64_t b = 0; b < product.blocks; ++b) {
    const uint32_t* w = product.weight(b, c);
    for (int64_t p = 0; p < kTile; ++p) {
      __m512bh weight[4];
      for (int v = 0; v < 4; ++v) weight[v] = (__m512bh)_mm512_loadu_si512(w + (v * kTile + p) * kTile);
      for (int i = 0; i < N; ++i) {
        int32_t pair;
        std::memcpy(&pair, product.factor(b, t + i) + 2 * p, 4);
        const __m512bh factor = (__m512bh)_mm512_set1_epi32(pair);
        for (int v = 0; v < 4; ++v) total[i][v] = _mm512_dpbf16_ps(total[i][v], factor, weight[v]);
      }
    }
  }
  for (int i = 0; i < N; ++i)
    for (int v = 0; v < 4; ++v) _mm512_storeu_ps(out[t + i] + c + v * kTile, total[i][v]);
}

template <int bits>
void sum_pairs(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
               const float* coefficients, int64_t stride, float* const* out) {
  thread_local PairProduct product;
  const int64_t last = std::min(first + kStrip, d / kGroup);
  product.start(count, n, 1);
  product.fill_weights<bits, false>(rows, count, d, first, last, 0);
  if (more.rows)
    with_bits(more.bits, [&](auto b) { product.fill_weights<b(), true>(more.rows, count, d, first, last, 0); });
  product.fill_factors(count, n, coefficients, stride);
  for (int64_t c = 0; c < product.columns; c += 4 * kTile) {
    int64_t t = 0;
    for (; n - t >= 6; t += 6) multiply<6>(product, t, c, out);
    for (; n - t >= 3; t += 3) multiply<3>(product, t, c, out);
    for (; t < n; ++t) multiply<1>(product, t, c, out);
  }
}

}  // namespace

const RowKernels* rows_avx512_bf16() {
  static const RowKernels* const table = []() -> const RowKernels* {
    if (!rows_avx512() || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vbmi")) return nullptr;
    static RowKernels bf16 = *rows_avx512();
    bf16.name = "avx512_bf16";
    bf16.sum_many[2] = sum_pairs<2>, bf16.sum_many[3] = sum_pairs<3>, bf16.sum_many[4] = sum_pairs<4>;
    return &bf16;
  }();
  return table;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_avx512_bf16() { return nullptr; }
}  // namespace rapidmoe
#endif
