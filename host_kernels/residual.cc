#include "residual.h"

#include <algorithm>
#include <cstring>

namespace rapidmoe {
namespace {

constexpr float kClampedAlpha = 1.702f;
constexpr int64_t kAhead = 8;  // records on that are fetched while W2 of one is summed, in a dense step

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

// Pass over one active expert's mask. `fill` false: count its units and choices; true: write them down.
void ResidualJob::scan(const ResidualRequest& request, int64_t active, bool fill) {
  const int64_t first = groups_.begin[active], n = tokens_of(active), units = layer_.units;
  thread_local std::vector<uint64_t> bits;
  bits.resize(n);
  Count at = fill ? before_[active] : Count{0, 0};
  for (int64_t j0 = 0; j0 < units; j0 += 64) {
    uint64_t any = 0;
    for (int64_t i = 0; i < n; ++i)
      any |= bits[i] = mask_bits(request.mask + groups_.pairs[first + i] * units + j0, std::min<int64_t>(64, units - j0));
    if (!fill) {
      at.units += __builtin_popcountll(any);
      for (int64_t i = 0; i < n; ++i) {
        const int count = __builtin_popcountll(bits[i]);
        chosen_[first + i] += count, at.choices += count;
      }
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
  if (!fill) before_[active] = at;  // plan() turns these into sums
}

void ResidualJob::plan(const RowKernels& rows, Pool& pool, const ResidualRequest& request) {
  const Step& step = request.step;
  rows_ = &rows, layer_ = request.layer, exact_ = request.exact, replaces_ = request.replaces, limit_ = request.limit;
  tokens_ = step.tokens, slots_ = step.slots;
  weights_.assign(request.weights, request.weights + step.pairs());
  experts_.assign(step.experts, step.experts + step.pairs());
  groups_.fill(step, layer_.experts);
  dense_ = !exact_ && is_dense(groups_);
  const int64_t experts = int64_t(groups_.experts.size());
  before_.resize(experts);
  chosen_.assign(groups_.pairs.size(), 0);
  const auto each = [&](bool fill) {
    const auto one = [&](int64_t a) { scan(request, a, fill); };
    if (step.pairs() * layer_.units > 8192) {
      pool.run(experts, one);
    } else {
      for (int64_t a = 0; a < experts; ++a) one(a);
    }
  };
  each(false);
  total_ = {0, 0};
  for (Count& count : before_) {
    const Count own = count;
    count = total_;
    total_ = {total_.units + own.units, total_.choices + own.choices};
  }
  before_.push_back(total_);
  parts_ = 0;
  if (!total_.units) return;
  if (int64_t(units_.size()) < total_.units) units_.resize(total_.units);
  if (int64_t(position_.size()) < total_.choices) position_.resize(total_.choices);
  float* values = values_.at_least(total_.choices * 3);
  u_ = values, v_ = u_ + total_.choices, h0_ = v_ + total_.choices;
  each(true);
  activations_.fill(rows, pool, step, exact_, dense_);
  if (dense_) {
    pair_sums_.start(step.pairs(), layer_.width);
    matrix_.resize(experts);
    int64_t size = 0;
    for (int64_t a = 0; a < experts; ++a) {
      matrix_[a] = size;
      size += tokens_of(a) * (before_[a + 1].units - before_[a].units);
    }
    base_ = matrices_.at_least(2 * size), residual_ = base_ + size;
    span_ = kManyUnits;
    parts_ = (total_.units + span_ - 1) / span_;
  } else {
    const int64_t most = PartialSums::parts_for(total_.units, tokens_, layer_.width);
    span_ = (total_.units + most * kBlock - 1) / (most * kBlock) * kBlock;  // whole blocks
    parts_ = (total_.units + span_ - 1) / span_;
    sums_.start(parts_, tokens_, layer_.width);
  }
}

const uint8_t* ResidualJob::record(const Unit& unit) const {
  const int64_t bytes = RecordLayout(layer_.base_bits, layer_.residual_bits, layer_.width).bytes;
  return layer_.records + (groups_.experts[unit.active] * layer_.units + unit.unit) * bytes;
}

void ResidualJob::operator()(int64_t p) {
  const int64_t begin = p * span_, last = std::min(total_.units, begin + span_);
  const int64_t most = dense_ ? kManyUnits : kBlock;
  if (!dense_) sums_.clear(p);
  for (int64_t i = begin; i < last;) {
    int64_t end = i + 1;
    while (end < last && end < i + most && units_[end].active == units_[i].active) ++end;
    factors(i, end, last, i == begin);
    if (!dense_) add(i, end, last, sums_.part(p));
    i = end;
  }
}

void ResidualJob::factors(int64_t first, int64_t last, int64_t part_last, bool cold) {
  const RecordLayout at(layer_.base_bits, layer_.residual_bits, layer_.width);
  const int64_t active = units_[first].active, n = tokens_of(active), count = last - first;
  const int64_t begin = units_[first].begin, choices = units_[last - 1].end - begin;
  const int32_t* pairs = pairs_of(active);
  const int bits = layer_.residual_bits;
  thread_local std::vector<const Activation*> x;
  thread_local std::vector<float> du, dv;  // [choices]
  thread_local std::vector<Row> gate, up;  // [count]
  x.resize(n), du.resize(choices), dv.resize(choices), gate.resize(count), up.resize(count);
  for (int64_t i = first; i < last; ++i) {
    const uint8_t* data = record(units_[i]);
    const int64_t next = i + 1 < part_last ? record(units_[i + 1]) - data : 0;  // W1 and W3, fetched meanwhile
    gate[i - first] = {data + at.r1, halves(data + at.r1_scale), nullptr, next, next};
    up[i - first] = {data + at.r3, halves(data + at.r3_scale), nullptr, next, next};
  }
  if (dense_ && n >= rows_->many && choices * 3 > n * count) {  // most pairs chose most units: all of them for all
    thread_local std::vector<float> both;
    thread_local std::vector<float*> out;
    both.resize(n * 2 * count), out.resize(n);
    for (int64_t i = 0; i < n; ++i) x[i] = activations_[pairs[i] / slots_], out[i] = &both[i * 2 * count];
    gate.insert(gate.end(), up.begin(), up.end());
    rows_->dot_many[bits](gate.data(), 2 * count, layer_.width, n, x.data(), out.data());
    for (int64_t i = first; i < last; ++i)
      for (int64_t c = units_[i].begin; c < units_[i].end; ++c) {
        const float* dots = out[position_[c]] + i - first;
        du[c - begin] = dots[0], dv[c - begin] = dots[count];
      }
  } else {
    for (int64_t i = first; i < last; ++i) {
      const Unit& unit = units_[i];
      if (cold) prefetch(record(unit) + at.b2, record(unit) + at.bytes);  // W2; else the block before has fetched it
      const int64_t own = unit.end - unit.begin;
      float *u = &du[unit.begin - begin], *v = &dv[unit.begin - begin];
      for (int64_t c = 0; c < own; ++c) x[c] = activations_[pairs[position_[unit.begin + c]] / slots_];
      if (exact_) {
        rows_->dot_f32[bits](gate[i - first], layer_.width, own, x.data(), u);
        rows_->dot_f32[bits](up[i - first], layer_.width, own, x.data(), v);
      } else {
        rows_->dot_i8[bits](gate[i - first], up[i - first], layer_.width, own, x.data(), u, v);
      }
    }
  }
  for (int64_t c = 0; c < choices; ++c) du[c] += u_[begin + c], dv[c] += v_[begin + c];
  if (limit_ > 0)
    for (int64_t c = 0; c < choices; ++c) {  // a sigmoid(alpha a) = silu(alpha a) / alpha
      du[c] = kClampedAlpha * std::min(du[c], limit_);
      dv[c] = (std::clamp(dv[c], -limit_, limit_) + 1) / kClampedAlpha;
    }
  rows_->silu_mul(du.data(), dv.data(), choices, du.data());  // h
  for (int64_t c = begin; c < begin + choices; ++c) {
    const int64_t own = groups_.begin[active] + position_[c];
    const bool whole = replaces_ && chosen_[own] == layer_.units;  // the base has left this pair out
    const float weight = weights_[groups_.pairs[own]], h = du[c - begin];
    u_[c] = weight * (whole ? h : h - h0_[c]);
    v_[c] = weight * h;
  }
  if (!dense_) return;
  const int64_t stride = before_[active + 1].units - before_[active].units;
  const int64_t corner = matrix_[active] + first - before_[active].units;
  for (float* matrix : {base_ + corner, residual_ + corner})
    for (int64_t i = 0; i < n; ++i) std::memset(matrix + i * stride, 0, size_t(count) * sizeof(float));
  for (int64_t i = first; i < last; ++i)
    for (int64_t c = units_[i].begin; c < units_[i].end; ++c) {
      const int64_t at = corner + position_[c] * stride + i - first;
      base_[at] = u_[c], residual_[at] = v_[c];
    }
}

void ResidualJob::add(int64_t first, int64_t last, int64_t part_last, float* acc) const {
  const RecordLayout at(layer_.base_bits, layer_.residual_bits, layer_.width);
  const int64_t active = units_[first].active, n = tokens_of(active), width = layer_.width;
  const int32_t* pairs = pairs_of(active);
  thread_local std::vector<float> base, residual;  // [n, kBlock]
  base.assign(n * kBlock, 0.0f), residual.assign(n * kBlock, 0.0f);
  Row base_rows[kBlock], residual_rows[kBlock];
  for (int64_t j = 0; j < kBlock; ++j) {  // what is left over repeats the last unit, times zero
    const Unit& unit = units_[std::min(first + j, last - 1)];
    const uint8_t* data = record(unit);
    const int64_t next = last + j < part_last ? record(units_[last + j]) - data : 0;
    base_rows[j] = {data + at.b2, halves(data + at.b2_scale), halves(data + at.b2_offset), next, next};
    residual_rows[j] = {data + at.r2, halves(data + at.r2_scale), nullptr, next, next};
    for (int64_t c = unit.begin; c < unit.end && first + j < last; ++c)
      base[position_[c] * kBlock + j] = u_[c], residual[position_[c] * kBlock + j] = v_[c];
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
      const bool whole = replaces_ && chosen_[groups_.begin[active] + i] == layer_.units;
      (whole ? rows_->add_block_fine : rows_->add_block)[layer_.base_bits](base_rows, a, width, out);
      rows_->add_block[layer_.residual_bits](residual_rows, b, width, out);
    }
  }
}

void ResidualJob::add_dense(Pool& pool) {
  const RecordLayout at(layer_.base_bits, layer_.residual_bits, layer_.width);
  std::vector<DenseItem> items;
  dense_items(groups_, layer_.width, rows_->many, &items);
  pool.run(int64_t(items.size()), [&](int64_t i) {
    const DenseItem& item = items[i];
    const int64_t n = tokens_of(item.active), first = before_[item.active].units;
    const int64_t count = before_[item.active + 1].units - first;
    const int32_t* pairs = pairs_of(item.active);
    pair_sums_.clear(pairs, n, item.first, item.last);
    thread_local std::vector<Row> base, residual;
    base.resize(count), residual.resize(count);
    for (int64_t j = 0; j < count; ++j) {
      const uint8_t* data = record(units_[first + j]);
      const int64_t ahead = j + kAhead < count ? record(units_[first + j + kAhead]) - data : 0;
      base[j] = {data + at.b2, halves(data + at.b2_scale), halves(data + at.b2_offset), ahead, ahead};
      residual[j] = {data + at.r2, halves(data + at.r2_scale), nullptr, ahead, ahead};
    }
    const int64_t* chosen = chosen_.data() + groups_.begin[item.active];
    const bool whole = replaces_ && std::all_of(chosen, chosen + n, [&](int64_t c) { return c == layer_.units; });
    const int64_t corner = matrix_[item.active];
    if (whole && n >= rows_->many) {  // both have the same factors
      dense_sum_many(*rows_, item, layer_.base_bits, base, {residual.data(), layer_.residual_bits}, layer_.width, pairs, n,
                     base_ + corner, pair_sums_);
      return;
    }
    dense_sum(*rows_, item, layer_.base_bits, replaces_, base, layer_.width, pairs, n, base_ + corner, pair_sums_);
    dense_sum(*rows_, item, layer_.residual_bits, false, residual, layer_.width, pairs, n, residual_ + corner, pair_sums_);
  });
}

ResidualStats ResidualJob::finish(Pool& pool, const float* y_base, float* out) {
  if (!total_.units) {
    std::memcpy(out, y_base, tokens_ * layer_.width * sizeof(float));
  } else if (dense_) {
    add_dense(pool);
    pair_sums_.add_into(pool, {tokens_, slots_, layer_.width, nullptr, experts_.data()}, y_base, out);
  } else {
    sums_.add_into(pool, y_base, out);
  }
  return {total_.units, total_.choices};
}

}  // namespace rapidmoe
