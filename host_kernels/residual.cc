#include "residual.h"

#include <algorithm>
#include <cstring>

namespace rapidmoe {
namespace {

const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

void prefetch_record(const uint8_t* record, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(record + i, 0, 2);
}

}  // namespace

void ResidualJob::plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request) {
  const Step& step = request.step;
  rows_ = &rows, layer_ = request.layer, exact_ = request.exact, tokens_ = step.tokens, slots_ = step.slots;
  weights_.assign(request.weights, request.weights + step.pairs());
  groups_.fill(step, layer_.experts);
  units_.clear();
  chosen_.clear();
  for (size_t a = 0; a < groups_.experts.size(); ++a) {
    const int64_t first = groups_.begin[a], last = groups_.begin[a + 1];
    for (int64_t j = 0; j < layer_.units; ++j) {
      const int64_t before = int64_t(chosen_.size());
      for (int64_t i = first; i < last; ++i) {
        const int64_t value = groups_.pairs[i] * layer_.units + j;
        if (request.mask[value])
          chosen_.push_back({int32_t(i - first), request.u0[value], request.v0[value], request.h0[value]});
      }
      if (int64_t(chosen_.size()) > before)
        units_.push_back({int32_t(a), int32_t(j), before, int64_t(chosen_.size())});
    }
  }
  if (units_.empty()) return;
  activations_.fill(rows, pool, step, exact_);
  sums_.start(PartialSums::parts_for(int64_t(units_.size()), tokens_, layer_.width), tokens_, layer_.width);
}

const uint8_t* ResidualJob::record(const Unit& unit) const {
  const int64_t bytes = RecordLayout(layer_.base_bits, layer_.residual_bits, layer_.width).bytes;
  return layer_.records + (groups_.experts[unit.active] * layer_.units + unit.unit) * bytes;
}

void ResidualJob::part(int64_t p) {
  sums_.clear(p);
  const int64_t count = int64_t(units_.size()), last = count * (p + 1) / sums_.parts();
  for (int64_t i = count * p / sums_.parts(); i < last;) {
    int64_t end = i + 1;
    while (end < last && end < i + kBlock / 2 && units_[end].active == units_[i].active) ++end;
    block(i, end, sums_.part(p));
    i = end;
  }
}

void ResidualJob::block(int64_t first, int64_t last, float* acc) const {
  const RecordLayout at(layer_.base_bits, layer_.residual_bits, layer_.width);
  const auto dot = exact_ ? rows_->dot_f32[layer_.residual_bits] : rows_->dot_i8[layer_.residual_bits];
  const int32_t* pairs = groups_.pairs.data() + groups_.begin[units_[first].active];
  const int64_t n = groups_.begin[units_[first].active + 1] - groups_.begin[units_[first].active];
  // A unit's rows in a block: base at 2 i, residual at 2 i + 1. What is left over repeats the last unit, times zero.
  Row rows[kBlock];
  thread_local std::vector<float> coefficients, du, dv;  // [n, kBlock], [n], [n]
  thread_local std::vector<const Activation*> x;
  coefficients.assign(n * kBlock, 0.0f);
  x.resize(n), du.resize(n), dv.resize(n);
  for (int64_t i = first; i < first + kBlock / 2; ++i) {
    const Unit& unit = units_[std::min(i, last - 1)];
    const uint8_t* data = record(unit);
    rows[2 * (i - first)] = {data + at.b2, halves(data + at.b2_scale), halves(data + at.b2_offset)};
    rows[2 * (i - first) + 1] = {data + at.r2, halves(data + at.r2_scale), nullptr};
    if (i >= last) continue;
    if (i + 1 < int64_t(units_.size())) prefetch_record(record(units_[i + 1]), at.bytes);
    const int64_t chosen = unit.end - unit.begin;
    for (int64_t c = 0; c < chosen; ++c) x[c] = activations_[pairs[chosen_[unit.begin + c].position] / slots_];
    dot({data + at.r1, halves(data + at.r1_scale), nullptr}, layer_.width, chosen, x.data(), du.data());
    dot({data + at.r3, halves(data + at.r3_scale), nullptr}, layer_.width, chosen, x.data(), dv.data());
    for (int64_t c = 0; c < chosen; ++c) {
      const Choice& choice = chosen_[unit.begin + c];
      const float h = silu(choice.u0 + du[c]) * (choice.v0 + dv[c]), weight = weights_[pairs[choice.position]];
      float* pair_coefficients = &coefficients[choice.position * kBlock + 2 * (i - first)];
      pair_coefficients[0] = weight * (h - choice.h0);
      pair_coefficients[1] = weight * h;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const float* a = &coefficients[i * kBlock];
    if (std::all_of(a, a + kBlock, [](float value) { return value == 0.0f; })) continue;
    float* out = acc + pairs[i] / slots_ * layer_.width;
    if (exact_) {
      for (int64_t j = 0; j < kBlock; j += 2)
        rows_->add_pair[layer_.base_bits][layer_.residual_bits](rows[j], a[j], rows[j + 1], a[j + 1], layer_.width, out);
    } else {
      rows_->add_block[layer_.base_bits][layer_.residual_bits](rows, a, layer_.width, out);
    }
  }
}

ResidualStats ResidualJob::finish(Pool& pool, const float* y_base, float* out) const {
  if (units_.empty()) {
    std::memcpy(out, y_base, tokens_ * layer_.width * sizeof(float));
  } else {
    sums_.add_into(pool, y_base, out);
  }
  return {int64_t(units_.size()), int64_t(chosen_.size())};
}

}  // namespace rapidmoe
