#include "residual.h"

#include <cstring>

namespace rapidmoe {
namespace {

const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

void prefetch_record(const uint8_t* record, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(record + i, 0, 2);
}

}  // namespace

void ResidualJob::plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request) {
  request_ = request;
  rows_ = &rows;
  const Step& step = request.step;
  const int64_t units = request.layer.units;
  groups_.fill(step, request.layer.experts);
  units_.clear();
  chosen_.clear();
  for (size_t a = 0; a < groups_.experts.size(); ++a) {
    for (int64_t j = 0; j < units; ++j) {
      const int64_t before = int64_t(chosen_.size());
      for (int64_t i = groups_.begin[a]; i < groups_.begin[a + 1]; ++i) {
        const int32_t p = groups_.pairs[i];
        if (request.mask[p * units + j]) chosen_.push_back(p);
      }
      if (int64_t(chosen_.size()) > before)
        units_.push_back({groups_.experts[a], int32_t(j), before, int64_t(chosen_.size())});
    }
  }
  if (units_.empty()) return;
  activations_.fill(rows, pool, step, request.exact);
  sums_.start(PartialSums::parts_for(int64_t(units_.size()), step.tokens, step.width), step.tokens, step.width);
}

void ResidualJob::part(int64_t p) {
  const Step& step = request_.step;
  const RecordLayer& layer = request_.layer;
  const RecordLayout at(layer.base_bits, layer.residual_bits, layer.width);
  const RowKernels& rows = *rows_;
  const auto dot = request_.exact ? rows.dot_f32[layer.residual_bits] : rows.dot_i8[layer.residual_bits];
  const auto record_of = [&](const Unit& u) {
    return layer.records + (u.expert * layer.units + u.unit) * at.bytes;
  };
  sums_.clear(p);
  float* acc = sums_.part(p);
  std::vector<const Activation*> x;
  std::vector<float> du, dv, base, residual;
  const int64_t count = int64_t(units_.size()), last = count * (p + 1) / sums_.parts();
  for (int64_t i = count * p / sums_.parts(); i < last; ++i) {
    const Unit& unit = units_[i];
    const uint8_t* record = record_of(unit);
    if (i + 1 < last) prefetch_record(record_of(units_[i + 1]), at.bytes);
    const int64_t n = unit.end - unit.begin;
    x.resize(n), du.resize(n), dv.resize(n);
    for (int64_t c = 0; c < n; ++c) x[c] = activations_[chosen_[unit.begin + c] / step.slots];
    dot({record + at.r1, halves(record + at.r1_scale), nullptr}, layer.width, n, x.data(), du.data());
    dot({record + at.r3, halves(record + at.r3_scale), nullptr}, layer.width, n, x.data(), dv.data());
    const Row b2 = {record + at.b2, halves(record + at.b2_scale), halves(record + at.b2_offset)};
    const Row r2 = {record + at.r2, halves(record + at.r2_scale), nullptr};
    if (n > 1) {
      base.resize(layer.width), residual.resize(layer.width);
      rows.dequantize[layer.base_bits](b2, layer.width, base.data());
      rows.dequantize[layer.residual_bits](r2, layer.width, residual.data());
    }
    for (int64_t c = 0; c < n; ++c) {
      const int32_t pair = chosen_[unit.begin + c];
      const int64_t value = pair * layer.units + unit.unit;
      const float weight = request_.weights[pair];
      const float h = silu(request_.u0[value] + du[c]) * (request_.v0[value] + dv[c]);
      const float for_base = weight * (h - request_.h0[value]), for_residual = weight * h;
      float* out = acc + pair / step.slots * step.width;
      if (n > 1) {
        rows.add_f32(base.data(), for_base, step.width, out);
        rows.add_f32(residual.data(), for_residual, step.width, out);
      } else {
        rows.add_pair[layer.base_bits][layer.residual_bits](b2, for_base, r2, for_residual, step.width, out);
      }
    }
  }
}

ResidualStats ResidualJob::finish(Pool& pool, const float* y_base, float* out) const {
  const Step& step = request_.step;
  if (units_.empty()) {
    std::memcpy(out, y_base, step.tokens * step.width * sizeof(float));
  } else {
    sums_.add_into(pool, y_base, out);
  }
  return {int64_t(units_.size()), int64_t(chosen_.size())};
}

}  // namespace rapidmoe
