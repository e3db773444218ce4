#include "routing.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "topology.h"

namespace rapidmoe {

void Groups::fill(const Step& step, int64_t num_experts) {
  count_.assign(num_experts + 1, 0);
  for (int64_t p = 0; p < step.pairs(); ++p) {
    const int32_t e = step.experts[p];
    if (e < -1 || e >= num_experts)
      throw std::invalid_argument("expert id " + std::to_string(e) + " of token " + std::to_string(p / step.slots) +
                                  ", slot " + std::to_string(p % step.slots) + " is outside [-1, " +
                                  std::to_string(num_experts) + ")");
    if (e >= 0) ++count_[e];
  }
  experts.clear();
  begin.assign(1, 0);
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t n = count_[e];
    count_[e] = begin.back();
    if (n == 0) continue;
    experts.push_back(int32_t(e));
    begin.push_back(begin.back() + n);
  }
  pairs.resize(begin.back());
  for (int64_t p = 0; p < step.pairs(); ++p)
    if (step.experts[p] >= 0) pairs[count_[step.experts[p]]++] = int32_t(p);
}

void Activations::fill(const RowKernels& rows, Pool& pool, const Step& step, bool exact, bool dense) {
  const int64_t padded = padded_width(step.width), groups = padded / kGroup, total = step.tokens * step.width;
  tokens_.resize(step.tokens);
  if (exact) {
    float* x = x_.at_least(total);
    std::copy_n(step.x, total, x);
    for (int64_t t = 0; t < step.tokens; ++t)
      tokens_[t] = {x + t * step.width, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    return;
  }
  int8_t* codes = reinterpret_cast<int8_t*>(q_.at_least(step.tokens * padded * 3 / 4));
  float* scales = scales_.at_least(step.tokens * groups * 2);
  uint16_t* halves = dense && rows.round ? reinterpret_cast<uint16_t*>(halves_.at_least(total / 2)) : nullptr;
  const int64_t chunk = 8;
  pool.run((step.tokens + chunk - 1) / chunk, [&](int64_t part) {
    for (int64_t t = part * chunk; t < std::min(step.tokens, (part + 1) * chunk); ++t) {
      int8_t *q = codes + t * padded * 3, *q2 = q + padded, *q4 = q2 + padded;
      float *scale = scales + t * groups * 2, *sum = scale + groups;
      rows.quantize(step.x + t * step.width, step.width, q, q2, q4, scale, sum);
      uint16_t* half = halves ? halves + t * step.width : nullptr;
      if (half) rows.round(step.x + t * step.width, step.width, half);
      tokens_[t] = {nullptr, q, q2, q4, scale, sum, half};
    }
  });
}

int64_t PartialSums::parts_for(int64_t units, int64_t tokens, int64_t width) {
  const int64_t by_work = units / 16, by_memory = (int64_t(64) << 20) / std::max<int64_t>(1, tokens * width * 4);
  const int64_t by_machine = std::clamp<int64_t>(8 * online_cpus(), 16, 64);  // not by threads: sums must not change
  return std::max<int64_t>(1, std::min({by_machine, by_work, by_memory}));
}

void PartialSums::start(int64_t parts, int64_t tokens, int64_t width) {
  parts_ = parts, tokens_ = tokens, width_ = width;
  sums_ = data_.at_least(parts * tokens * width);
}

float* PartialSums::part(int64_t p) { return sums_ + p * tokens_ * width_; }

void PartialSums::clear(int64_t p) { std::memset(part(p), 0, tokens_ * width_ * sizeof(float)); }

void PartialSums::add_into(Pool& pool, const float* base, float* out) const {
  const int64_t total = tokens_ * width_, chunk = std::max<int64_t>(128, 16384 / parts_);
  pool.run((total + chunk - 1) / chunk, [&](int64_t c) {
    const int64_t first = c * chunk, last = std::min(total, first + chunk);
    if (!base) {
      std::memset(out + first, 0, (last - first) * sizeof(float));
    } else if (base != out) {
      std::memcpy(out + first, base + first, (last - first) * sizeof(float));
    }
    for (int64_t p = 0; p < parts_; ++p) {
      const float* sum = sums_ + p * total;
      for (int64_t i = first; i < last; ++i) out[i] += sum[i];
    }
  });
}

void PairSums::start(int64_t pairs, int64_t width) {
  width_ = width;
  sums_ = data_.at_least(pairs * width);
}

void PairSums::clear(const int32_t* pairs, int64_t n, int64_t first, int64_t last) {
  for (int64_t i = 0; i < n; ++i)
    std::memset(row(pairs[i]) + first * kGroup, 0, size_t(last - first) * kGroup * sizeof(float));
}

void PairSums::add_into(Pool& pool, const Step& step, const float* base, float* out) const {
  pool.run(step.tokens, [&](int64_t t) {
    float* to = out + t * width_;
    if (!base) {
      std::memset(to, 0, width_ * sizeof(float));
    } else if (base != out) {
      std::memcpy(to, base + t * width_, width_ * sizeof(float));
    }
    for (int64_t p = t * step.slots; p < (t + 1) * step.slots; ++p) {
      if (step.experts[p] < 0) continue;
      const float* from = sums_ + p * width_;
      for (int64_t i = 0; i < width_; ++i) to[i] += from[i];
    }
  });
}

}  // namespace rapidmoe
