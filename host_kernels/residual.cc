#include "residual.h"

#include <algorithm>
#include <cstring>

namespace rapidmoe {
namespace {

const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

void prefetch(const uint8_t* first, const uint8_t* last) {
  for (; first < last; first += 64) __builtin_prefetch(first, 0, 2);
}

// Bit i of the result: mask[i], for 64 booleans or the `count` that are left.
uint64_t mask_bits(const bool* mask, int64_t count) {
  uint8_t bytes[64] = {};
  if (count < 64) {
    std::memcpy(bytes, mask, size_t(count));
    mask = reinterpret_cast<const bool*>(bytes);
  }
  uint64_t bits = 0, word;
  for (int i = 0; i < 8; ++i) {
    std::memcpy(&word, mask + 8 * i, 8);
    bits |= ((word * 0x0102040810204080) >> 56) << 8 * i;
  }
  return bits;
}

}  // namespace

// Pass over one active expert's mask. `fill` false: count its units and choices; true: write them from `at` on.
void ResidualJob::scan(const ResidualRequest& request, int64_t active, bool fill) {
  const int64_t first = groups_.begin[active], n = groups_.begin[active + 1] - first, units = layer_.units;
  thread_local std::vector<uint64_t> bits;
  bits.resize(n);
  Count at = counts_[active];
  const Count start = at;
  for (int64_t j0 = 0; j0 < units; j0 += 64) {
    uint64_t any = 0;
    for (int64_t i = 0; i < n; ++i)
      any |= bits[i] = mask_bits(request.mask + groups_.pairs[first + i] * units + j0, std::min<int64_t>(64, units - j0));
    if (!fill) {
      at.units += __builtin_popcountll(any);
      for (int64_t i = 0; i < n; ++i) at.choices += __builtin_popcountll(bits[i]);
      continue;
    }
    for (; any; any &= any - 1) {
      const int bit = __builtin_ctzll(any);
      units_[at.units] = {int32_t(active), int32_t(j0 + bit), at.choices, 0};
      for (int64_t i = 0; i < n; ++i) {
        if (!(bits[i] >> bit & 1)) continue;
        const int64_t value = groups_.pairs[first + i] * units + j0 + bit;
        position_[at.choices] = int32_t(i);
        u_[at.choices] = request.u0[value], v_[at.choices] = request.v0[value], h0_[at.choices] = request.h0[value];
        ++at.choices;
      }
      units_[at.units++].end = at.choices;
    }
  }
  if (!fill) counts_[active] = {at.units - start.units, at.choices - start.choices};
}

void ResidualJob::plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request) {
  const Step& step = request.step;
  rows_ = &rows, layer_ = request.layer, exact_ = request.exact, tokens_ = step.tokens, slots_ = step.slots;
  weights_.assign(request.weights, request.weights + step.pairs());
  groups_.fill(step, layer_.experts);
  const int64_t experts = int64_t(groups_.experts.size());
  counts_.assign(experts, Count{0, 0});
  const auto each = [&](bool fill) {
    const auto one = [&](int64_t a) { scan(request, a, fill); };
    if (step.pairs() > 64) {
      pool.run(experts, one);
    } else {
      for (int64_t a = 0; a < experts; ++a) one(a);
    }
  };
  each(false);
  total_ = {0, 0};
  for (Count& count : counts_) {
    const Count own = count;
    count = total_;
    total_ = {total_.units + own.units, total_.choices + own.choices};
  }
  if (!total_.units) return;
  if (int64_t(units_.size()) < total_.units) units_.resize(total_.units);
  if (int64_t(position_.size()) < total_.choices) position_.resize(total_.choices);
  float* values = values_.at_least(total_.choices * 3);
  u_ = values, v_ = u_ + total_.choices, h0_ = v_ + total_.choices;
  each(true);
  activations_.fill(rows, pool, step, exact_);
  sums_.start(PartialSums::parts_for(total_.units, tokens_, layer_.width), tokens_, layer_.width);
}

const uint8_t* ResidualJob::record(const Unit& unit) const {
  const int64_t bytes = RecordLayout(layer_.base_bits, layer_.residual_bits, layer_.width).bytes;
  return layer_.records + (groups_.experts[unit.active] * layer_.units + unit.unit) * bytes;
}

void ResidualJob::operator()(int64_t p) {
  sums_.clear(p);
  const int64_t begin = total_.units * p / sums_.parts(), last = total_.units * (p + 1) / sums_.parts();
  for (int64_t i = begin; i < last;) {
    int64_t end = i + 1;
    while (end < last && end < i + kBlock && units_[end].active == units_[i].active) ++end;
    block(i, end, last, i == begin, sums_.part(p));
    i = end;
  }
}

void ResidualJob::block(int64_t first, int64_t last, int64_t part_last, bool cold, float* acc) {
  const RecordLayout at(layer_.base_bits, layer_.residual_bits, layer_.width);
  const int64_t width = layer_.width, begin = units_[first].begin, end = units_[last - 1].end;
  const int32_t* pairs = groups_.pairs.data() + groups_.begin[units_[first].active];
  const int64_t n = groups_.begin[units_[first].active + 1] - groups_.begin[units_[first].active];
  thread_local std::vector<const Activation*> x;
  thread_local std::vector<float> du, dv, base, residual;  // of choices begin .. end - 1; coefficients [n, kBlock]
  x.resize(n), du.resize(end - begin), dv.resize(end - begin);
  for (int64_t i = first; i < last; ++i) {
    const Unit& unit = units_[i];
    const uint8_t* data = record(unit);
    // W1 and W3 of the next unit are fetched meanwhile; W2 by the block before, or here where there is none.
    const int64_t next = i + 1 < part_last ? record(units_[i + 1]) - data : 0;
    if (cold) prefetch(data + at.b2, data + at.bytes);
    const Row gate = {data + at.r1, halves(data + at.r1_scale), nullptr, next, next};
    const Row up = {data + at.r3, halves(data + at.r3_scale), nullptr, next, next};
    const int64_t count = unit.end - unit.begin;
    float *u = &du[unit.begin - begin], *v = &dv[unit.begin - begin];
    for (int64_t c = 0; c < count; ++c) x[c] = activations_[pairs[position_[unit.begin + c]] / slots_];
    if (exact_) {
      rows_->dot_f32[layer_.residual_bits](gate, width, count, x.data(), u);
      rows_->dot_f32[layer_.residual_bits](up, width, count, x.data(), v);
    } else {
      rows_->dot_i8[layer_.residual_bits](gate, up, width, count, x.data(), u, v);
    }
  }
  for (int64_t c = begin; c < end; ++c) du[c - begin] += u_[c], dv[c - begin] += v_[c];
  rows_->silu_mul(du.data(), dv.data(), end - begin, du.data());  // h
  base.assign(n * kBlock, 0.0f), residual.assign(n * kBlock, 0.0f);
  Row base_rows[kBlock], residual_rows[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {  // what is left over repeats the last unit, times zero
    const Unit& unit = units_[std::min(first + j, last - 1)];
    const uint8_t* data = record(unit);
    const int64_t next = last + j < part_last ? record(units_[last + j]) - data : 0;
    base_rows[j] = {data + at.b2, halves(data + at.b2_scale), halves(data + at.b2_offset), next, next};
    residual_rows[j] = {data + at.r2, halves(data + at.r2_scale), nullptr, next, next};
    if (first + j >= last) continue;
    for (int64_t c = unit.begin; c < unit.end; ++c) {
      const float weight = weights_[pairs[position_[c]]], h = du[c - begin];
      base[position_[c] * kBlock + j] = weight * (h - h0_[c]);
      residual[position_[c] * kBlock + j] = weight * h;
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const float *a = &base[i * kBlock], *b = &residual[i * kBlock];
    const auto zero = [](float value) { return value == 0.0f; };
    if (std::all_of(a, a + kBlock, zero) && std::all_of(b, b + kBlock, zero)) continue;
    float* out = acc + pairs[i] / slots_ * width;
    if (exact_) {
      for (int64_t j = 0; j < last - first; ++j) {
        rows_->add[layer_.base_bits](base_rows[j], a[j], width, out);
        rows_->add[layer_.residual_bits](residual_rows[j], b[j], width, out);
      }
    } else {
      rows_->add_block[layer_.base_bits](base_rows, a, width, out);
      rows_->add_block[layer_.residual_bits](residual_rows, b, width, out);
    }
  }
}

ResidualStats ResidualJob::finish(Pool& pool, const float* y_base, float* out) const {
  if (!total_.units) {
    std::memcpy(out, y_base, tokens_ * layer_.width * sizeof(float));
  } else {
    sums_.add_into(pool, y_base, out);
  }
  return {total_.units, total_.choices};
}

}  // namespace rapidmoe
