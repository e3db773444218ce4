// Nested splits. Plain loops over the 64 weights of a group, which compilers turn into vectors; no fused multiply-add,
// so that every processor gives the bits that numpy gives.
#include "nested.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define RAPIDMOE_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define RAPIDMOE_CLONES
#endif

namespace rapidmoe {
namespace {

constexpr float kShrink[] = {1.0f, 0.94f, 0.88f, 0.8f, 0.7f};  // tried scales of a residual group: quant.py
constexpr int64_t kLanes = 8;

float half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? std::ldexp(float(mantissa + 1024), exponent - 25)
                                    : std::ldexp(float(mantissa), -24);
  return h & 0x8000 ? -size : size;
}

// Nearest integer, ties to even, for |a| < 2^22.
inline float nearest(float a) { return (a + 12582912.0f) - 12582912.0f; }

inline float sum_lanes(const float* lane) {
  return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

// Sum of squares in quant.sum_squares' order.
inline float sum_squares(const float* a) {
  float lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lane[j] = a[j] * a[j];
  for (int64_t i = kLanes; i < kGroup; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += a[i + j] * a[i + j];
  return sum_lanes(lane);
}

// Codes of one group into the planes of its row: layout.h.
inline void pack_group(const uint8_t* code, int bits, int64_t group, int64_t width, uint8_t* row) {
  const auto plane = [&](int n, int shift, uint8_t* out) {
    const int64_t bytes = 8 * n, mask = (1 << n) - 1;
    for (int64_t j = 0; j < bytes; ++j) out[j] = uint8_t((code[j] >> shift) & mask);
    for (int place = 1; place < 8 / n; ++place)
      for (int64_t j = 0; j < bytes; ++j)
        out[j] = uint8_t(out[j] | ((code[place * bytes + j] >> shift) & mask) << (n * place));
  };
  if (bits == 3) {
    plane(2, 0, row + 16 * group);
    plane(1, 2, row + width / 4 + 8 * group);
  } else {
    plane(bits, 0, row + 8 * bits * group);
  }
}

struct Group {
  uint8_t base[kGroup], residual[kGroup];
  uint16_t scale, offset, residual_scale;
  float base_norm, residual_norm, weight, lost, left;  // sums of squares
};

RAPIDMOE_CLONES void split_group(const float* w, int base_bits, int residual_bits, Group* out) {
  float low = 0, high = 0;
  {
    float lows[kLanes] = {}, highs[kLanes] = {};
    for (int64_t i = 0; i < kGroup; i += kLanes)
      for (int64_t j = 0; j < kLanes; ++j) {
        lows[j] = lows[j] < w[i + j] ? lows[j] : w[i + j];
        highs[j] = highs[j] > w[i + j] ? highs[j] : w[i + j];
      }
    for (int64_t j = 0; j < kLanes; ++j) low = std::min(low, lows[j]), high = std::max(high, highs[j]);
  }
  const float top = float((1 << (base_bits + residual_bits)) - 1), long_steps = float(1 << residual_bits);
  out->scale = float_to_half((high - low) / top * long_steps);
  const float scale = half_value(out->scale), step = scale / long_steps, safe = step > 0 ? step : 1.0f;
  const float zero = std::nearbyint(-low / safe);
  out->offset = float_to_half(step * ((long_steps - 1) / 2 - zero));
  const float offset = half_value(out->offset);

  float rest[kGroup], kept[kGroup];
  for (int64_t i = 0; i < kGroup; ++i) {
    const float code = std::min(std::max(nearest(w[i] / safe) + zero, 0.0f), top);
    const int32_t base = int32_t(code) >> residual_bits;
    out->base[i] = uint8_t(base);
    kept[i] = float(base) * scale + offset;
    rest[i] = w[i] - kept[i];
  }
  out->weight = sum_squares(w), out->base_norm = sum_squares(kept), out->lost = sum_squares(rest);

  float largest = 0;
  for (int64_t i = 0; i < kGroup; ++i) largest = std::max(largest, std::fabs(rest[i]));
  const float middle = float((1 << residual_bits) - 1) / 2, last = float((1 << residual_bits) - 1);
  float best = INFINITY;
  out->residual_scale = 0, out->residual_norm = 0, out->left = out->lost;
  std::memset(out->residual, 0, kGroup);
  for (const float shrink : kShrink) {
    const uint16_t half = float_to_half(largest / float(1 << (residual_bits - 1)) * shrink);
    const float try_step = half_value(half), try_safe = try_step > 0 ? try_step : 1.0f;
    float code[kGroup], value[kGroup], left[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) {
      code[i] = std::min(std::max(nearest(rest[i] / try_safe + middle), 0.0f), last);
      value[i] = try_step * (code[i] - middle);
      left[i] = rest[i] - value[i];
    }
    const float error = sum_squares(left);
    if (!(error < best)) continue;
    best = error;
    out->residual_scale = half, out->residual_norm = sum_squares(value), out->left = error;
    for (int64_t i = 0; i < kGroup; ++i) out->residual[i] = uint8_t(int32_t(code[i]));
  }
}

}  // namespace

uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float size = std::fabs(value);
  if (std::isnan(value)) return uint16_t(sign | 0x7E00);
  if (size >= 65520.0f) return uint16_t(sign | 0x7C00);
  if (size < 6.103515625e-05f)  // below 2^-14: a multiple of 2^-24
    return uint16_t(sign | uint16_t(std::nearbyint(size * 16777216.0f)));
  const uint32_t rounded = (bits & 0x7FFFFFFF) + 0xFFF + (bits >> 13 & 1);
  return uint16_t(sign | ((rounded >> 13) - (112 << 10)));
}

void split_nested(const NestedSplit& job, int64_t first, int64_t last) {
  const int64_t d = job.width, groups = d / kGroup, base_row = row_bytes(job.base_bits, d);
  const RecordLayout at(job.base_bits, job.residual_bits, d);
  const int64_t residual_at[] = {at.r1, at.r3, at.r2}, scale_at[] = {at.r1_scale, at.r3_scale, at.r2_scale};
  for (int64_t unit = first; unit < last; ++unit) {
    uint8_t* record = job.records + unit * at.bytes;
    double norm[4] = {}, sum[3] = {};
    for (int64_t matrix = 0; matrix < 3; ++matrix) {
      const int64_t row = matrix * job.units + unit;
      for (int64_t g = 0; g < groups; ++g) {
        Group group;
        split_group(job.weights + row * d + g * kGroup, job.base_bits, job.residual_bits, &group);
        pack_group(group.base, job.base_bits, g, d, job.codes + row * base_row);
        pack_group(group.residual, job.residual_bits, g, d, record + residual_at[matrix]);
        job.scale[row * groups + g] = group.scale;
        job.offset[row * groups + g] = group.offset;
        std::memcpy(record + scale_at[matrix] + 2 * g, &group.residual_scale, 2);
        norm[matrix] += group.residual_norm;
        if (matrix == 2) norm[3] += group.base_norm;
        sum[0] += group.weight, sum[1] += group.lost, sum[2] += group.left;
      }
    }
    const int64_t down = 2 * job.units + unit;
    std::memcpy(record + at.b2, job.codes + down * base_row, size_t(base_row));
    std::memcpy(record + at.b2_scale, job.scale + down * groups, size_t(2 * groups));
    std::memcpy(record + at.b2_offset, job.offset + down * groups, size_t(2 * groups));
    for (int i = 0; i < 4; ++i) job.norms[4 * unit + i] = float(norm[i]);
    for (int i = 0; i < 3; ++i) job.sums[3 * unit + i] = sum[i];
  }
}

}  // namespace rapidmoe
