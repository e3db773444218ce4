// Scalar row kernels: the definition. Slow and plain on purpose.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "layout.h"
#include "rows.h"

namespace rapidmoe {
namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {
    const float tiny = std::ldexp(float(fraction), -24);
    return sign ? -tiny : tiny;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

int plane_code(const uint8_t* plane, int n, int64_t i) {
  const int64_t group = i / kGroup, e = i % kGroup;
  const int64_t byte = group * 8 * n + e % (8 * n);
  return (plane[byte] >> (n * (e / (8 * n)))) & ((1 << n) - 1);
}

template <int bits>
int code_at(const uint8_t* codes, int64_t d, int64_t i) {
  if constexpr (bits == 3) return plane_code(codes, 2, i) | plane_code(codes + row_bytes(2, d), 1, i) << 2;
  return plane_code(codes, bits, i);
}

template <int bits>
float offset_at(const Row& row, int64_t g) {
  if (row.offset) return half_to_float(row.offset[g]);
  return half_to_float(row.scale[g]) * (-0.5f * ((1 << bits) - 1));
}

template <int bits>
float dot_one(const Row& row, int64_t d, const Activation& x) {
  float total = 0;
  for (int64_t g = 0; g < d / kGroup; ++g) {
    int32_t dot = 0;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) dot += code_at<bits>(row.codes, d, i) * x.q[i];
    total += half_to_float(row.scale[g]) * x.scale[g] * float(dot) + offset_at<bits>(row, g) * x.sum[g];
  }
  return total;
}

template <int bits>
void dot_i8(const Row& first, const Row& second, int64_t d, int64_t n, const Activation* const* x, float* a, float* b) {
  for (int64_t t = 0; t < n; ++t) {
    a[t] = dot_one<bits>(first, d, *x[t]);
    b[t] = dot_one<bits>(second, d, *x[t]);
  }
}

template <int bits>
void dequantize(const Row& row, int64_t d, float* w) {
  for (int64_t i = 0; i < d; ++i) {
    const int64_t g = i / kGroup;
    w[i] = half_to_float(row.scale[g]) * float(code_at<bits>(row.codes, d, i)) + offset_at<bits>(row, g);
  }
}

template <int bits>
void dot_f32(const Row& row, int64_t d, int64_t n, const Activation* const* x, float* out) {
  for (int64_t t = 0; t < n; ++t) {
    float total = 0;
    for (int64_t g = 0; g < d / kGroup; ++g) {
      float dot = 0, sum = 0;
      for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
        dot += float(code_at<bits>(row.codes, d, i)) * x[t]->x[i];
        sum += x[t]->x[i];
      }
      total += half_to_float(row.scale[g]) * dot + offset_at<bits>(row, g) * sum;
    }
    out[t] = total;
  }
}

template <int bits>
void add(const Row& row, float a, int64_t d, float* acc) {
  for (int64_t i = 0; i < d; ++i) {
    const int64_t g = i / kGroup;
    acc[i] += a * (half_to_float(row.scale[g]) * float(code_at<bits>(row.codes, d, i)) + offset_at<bits>(row, g));
  }
}

template <int bits, int limit>
void add_block(const Row* rows, const float* coefficients, int64_t d, float* acc) {
  for (int64_t g = 0; g < d / kGroup; ++g) {
    float product[kBlock], largest = 0, shift = 0;
    for (int r = 0; r < kBlock; ++r) {
      product[r] = coefficients[r] * half_to_float(rows[r].scale[g]);
      shift += coefficients[r] * offset_at<bits>(rows[r], g);
      largest = std::fabs(product[r]) > largest ? std::fabs(product[r]) : largest;
    }
    const float step = largest * (1.0f / limit), inverse = step >= 1e-37f ? 1.0f / step : 0.0f;
    int32_t rounded[kBlock];
    for (int r = 0; r < kBlock; ++r) {
      const float value = std::nearbyintf(product[r] * inverse);
      rounded[r] = std::fabs(value) <= limit ? int32_t(value) : 0;  // NaN and Inf come through shift
    }
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      int32_t total = 0;
      for (int r = 0; r < kBlock; ++r) total += rounded[r] * code_at<bits>(rows[r].codes, d, i);
      acc[i] += step * float(total) + shift;
    }
  }
}

template <int bits>
void dot_many(const Row* rows, int64_t count, int64_t d, int64_t n, const Activation* const* x, float* const* out) {
  for (int64_t i = 0; i < n; ++i)
    for (int64_t r = 0; r < count; ++r) out[i][r] = dot_one<bits>(rows[r], d, *x[i]);
}

template <int bits>
float weight_at(const Row& row, int64_t d, int64_t i) {
  return half_to_float(row.scale[i / kGroup]) * float(code_at<bits>(row.codes, d, i)) + offset_at<bits>(row, i / kGroup);
}

template <int bits>
void sum_many(const Row* rows, const More& more, int64_t count, int64_t d, int64_t first, int64_t n,
              const float* coefficients, int64_t stride, float* const* out) {
  const int64_t last = std::min(d, (first + kStrip) * kGroup);
  const auto weight_of_more = more.bits == 2 ? weight_at<2> : more.bits == 3 ? weight_at<3> : weight_at<4>;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = first * kGroup; c < last; ++c) {
        const float w = weight_at<bits>(rows[r], d, c) + (more.rows ? weight_of_more(more.rows[r], d, c) : 0.0f);
        out[i][c - first * kGroup] += coefficients[i * stride + r] * w;
      }
}

void quantize(const float* x, int64_t d, int8_t* q, int8_t*, int8_t*, float* scale, float* sum) {
  for (int64_t g = 0; g < d / kGroup; ++g) {
    float largest = 0, poison = 0;  // poison: 0, or NaN where any value is NaN or Inf
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      poison += x[i] * 0.0f;
      if (std::fabs(x[i]) > largest) largest = std::fabs(x[i]);
    }
    const float step = largest / 127.0f;
    const float inverse = step >= 1e-37f && poison == 0 ? 1.0f / step : 0.0f;
    int32_t total = 0;
    for (int64_t i = g * kGroup; i < (g + 1) * kGroup; ++i) {
      q[i] = inverse == 0.0f ? 0 : int8_t(std::nearbyintf(x[i] * inverse));
      total += q[i];
    }
    scale[g] = step + poison;
    sum[g] = scale[g] * float(total);
  }
}

void silu_mul(const float* u, const float* v, int64_t n, float* h) {
  for (int64_t i = 0; i < n; ++i) h[i] = u[i] / (1.0f + std::exp(-u[i])) * v[i];
}

}  // namespace

const RowKernels& rows_scalar() {
  static const RowKernels table = {
      "scalar",
      quantize,
      {nullptr, nullptr, dot_i8<2>, dot_i8<3>, dot_i8<4>},
      {nullptr, nullptr, dot_f32<2>, dot_f32<3>, dot_f32<4>},
      {nullptr, nullptr, dequantize<2>, dequantize<3>, dequantize<4>},
      {nullptr, nullptr, add<2>, add<3>, add<4>},
      {nullptr, nullptr, add_block<2, 127>, add_block<3, 127>, add_block<4, 127>},
      {nullptr, nullptr, add_block<2, kFine>, add_block<3, kFine>, add_block<4, kFine>},
      {nullptr, nullptr, dot_many<2>, dot_many<3>, dot_many<4>},
      {nullptr, nullptr, sum_many<2>, sum_many<3>, sum_many<4>},
      silu_mul};
  return table;
}

const RowKernels* find_rows(const char* name) {
  const bool automatic = std::strcmp(name, "auto") == 0;
  for (const auto table : {rows_amx, rows_avx512_bf16, rows_avx512, rows_avx2}) {
    const RowKernels* rows = table();
    if (rows && (automatic || std::strcmp(name, rows->name) == 0)) return rows;
  }
  return automatic || std::strcmp(name, "scalar") == 0 ? &rows_scalar() : nullptr;
}

}  // namespace rapidmoe
