#include "base.h"

#include <algorithm>
#include <cstring>

#include "dense.h"

namespace rapidmoe {
namespace {

constexpr int64_t kAheadRows = 4;  // gate/up rows are fetched this long before their use

// u[i][j] = gate row j . x_i, v[i][j] = up row j . x_i.
void dot_rows(const RowKernels& rows, const BaseLayer& layer, bool exact, const std::vector<Row>& gate,
              const std::vector<Row>& up, const std::vector<const Activation*>& x, const std::vector<float*>& u,
              const std::vector<float*>& v) {
  thread_local std::vector<float> a, b;
  const int64_t n = int64_t(x.size());
  a.resize(n), b.resize(n);
  for (size_t j = 0; j < gate.size(); ++j) {
    if (exact) {
      rows.dot_f32[layer.bits](gate[j], layer.width, n, x.data(), a.data());
      rows.dot_f32[layer.bits](up[j], layer.width, n, x.data(), b.data());
    } else {
      rows.dot_i8[layer.bits](gate[j], up[j], layer.width, n, x.data(), a.data(), b.data());
    }
    for (int64_t i = 0; i < n; ++i) u[i][j] = a[i], v[i][j] = b[i];
  }
}

// base_down for many tokens an expert.
void down_dense(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, const Groups& groups,
                const float* weights, const float* h0, float* y) {
  thread_local PairSums pair_sums;
  thread_local std::vector<DenseItem> items;
  dense_items(groups, layer.width, rows.many, &items);
  pair_sums.start(step.pairs(), layer.width);
  PairSums& sums = pair_sums;  // workers must see the caller's, not their own thread's
  const std::vector<DenseItem>& work = items;
  pool.run(int64_t(work.size()), [&](int64_t i) {
    const DenseItem& item = work[i];
    const int64_t begin = groups.begin[item.active], n = groups.begin[item.active + 1] - begin, units = layer.units;
    const int32_t* pairs = groups.pairs.data() + begin;
    thread_local std::vector<float> coefficients;
    coefficients.resize(n * units);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t j = 0; j < units; ++j) coefficients[t * units + j] = weights[pairs[t]] * h0[pairs[t] * units + j];
    thread_local std::vector<Row> down;
    down.resize(units);
    for (int64_t j = 0; j < units; ++j) down[j] = layer.row(groups.experts[item.active], 2, j, kAheadRows);
    sums.clear(pairs, n, item.first, item.last);
    dense_sum(rows, item, layer.bits, true, down, layer.width, pairs, n, coefficients.data(), sums);
  });
  sums.add_into(pool, step, nullptr, y);
}

}  // namespace

void base_gate_up(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, bool exact, float* u0,
                  float* v0, float* h0) {
  thread_local Groups groups;
  thread_local Activations activations;
  groups.fill(step, layer.experts);
  const bool dense = !exact && is_dense(groups);
  activations.fill(rows, pool, step, exact, dense);
  const Groups& grouped = groups;  // workers must see the caller's copy, not their own thread's
  const Activations& acts = activations;
  const int64_t units = layer.units, flat = int64_t(grouped.experts.size()) * units;
  for (int64_t p = 0; p < step.pairs(); ++p)
    if (step.experts[p] < 0)
      for (float* out : {u0, v0, h0}) std::memset(out + p * units, 0, units * sizeof(float));
  const int64_t parts = dense ? (flat + kManyUnits - 1) / kManyUnits : std::min<int64_t>(256, (flat + 7) / 8);
  pool.run(parts, [&](int64_t part) {
    thread_local std::vector<const Activation*> x;
    thread_local std::vector<Row> gate, up;
    thread_local std::vector<float*> u, v;
    const int64_t last = flat * (part + 1) / parts;
    for (int64_t first = flat * part / parts; first < last;) {  // units first .. end - 1 are of one expert
      const int64_t a = first / units, end = std::min(last, (a + 1) * units), count = end - first, j0 = first % units;
      const int64_t begin = grouped.begin[a], n = grouped.begin[a + 1] - begin;
      gate.resize(count), up.resize(count), x.resize(n), u.resize(n), v.resize(n);
      for (int64_t j = 0; j < count; ++j) {
        gate[j] = layer.row(grouped.experts[a], 0, j0 + j, kAheadRows);
        up[j] = layer.row(grouped.experts[a], 1, j0 + j, kAheadRows);
      }
      for (int64_t i = 0; i < n; ++i) {
        const int64_t p = grouped.pairs[begin + i];
        x[i] = acts[p / step.slots];
        u[i] = u0 + p * units + j0, v[i] = v0 + p * units + j0;
      }
      if (dense && n >= rows.many) {
        thread_local std::vector<float> both;
        thread_local std::vector<float*> out;
        both.resize(n * 2 * count), out.resize(n);
        for (int64_t i = 0; i < n; ++i) out[i] = &both[i * 2 * count];
        gate.insert(gate.end(), up.begin(), up.end());
        rows.dot_many[layer.bits](gate.data(), 2 * count, layer.width, n, x.data(), out.data());
        for (int64_t i = 0; i < n; ++i) {
          std::copy_n(out[i], count, u[i]);
          std::copy_n(out[i] + count, count, v[i]);
        }
      } else {
        dot_rows(rows, layer, exact, gate, up, x, u, v);
      }
      for (int64_t i = 0; i < n; ++i) rows.silu_mul(u[i], v[i], count, h0 + (u[i] - u0));
      first = end;
    }
  });
}

void base_down(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, bool exact,
               const float* weights, const float* h0, float* y) {
  thread_local Groups groups;
  thread_local PartialSums sums;
  groups.fill(step, layer.experts);
  const Groups& grouped = groups;
  if (!exact && is_dense(grouped)) return down_dense(rows, pool, layer, step, grouped, weights, h0, y);
  PartialSums& partial = sums;
  const int64_t units = layer.units, width = layer.width;
  const int64_t blocks = (units + kBlock - 1) / kBlock, flat = int64_t(grouped.experts.size()) * blocks;
  const int64_t parts = PartialSums::parts_for(flat * kBlock, step.tokens, width);
  partial.start(parts, step.tokens, width);
  pool.run(parts, [&](int64_t part) {
    partial.clear(part);
    for (int64_t i = flat * part / parts; i < flat * (part + 1) / parts; ++i) {
      const int64_t a = i / blocks, first = i % blocks * kBlock, count = std::min<int64_t>(kBlock, units - first);
      Row block[kBlock];
      for (int64_t j = 0; j < kBlock; ++j)
        block[j] = layer.row(grouped.experts[a], 2, first + std::min(j, count - 1), kBlock);
      for (int64_t at = grouped.begin[a]; at < grouped.begin[a + 1]; ++at) {
        const int64_t p = grouped.pairs[at];
        float coefficients[kBlock] = {};
        for (int64_t j = 0; j < count; ++j) coefficients[j] = weights[p] * h0[p * units + first + j];
        float* out = partial.part(part) + p / step.slots * width;
        if (exact) {
          for (int64_t j = 0; j < count; ++j) rows.add[layer.bits](block[j], coefficients[j], width, out);
        } else {
          rows.add_block_fine[layer.bits](block, coefficients, width, out);
        }
      }
    }
  });
  partial.add_into(pool, nullptr, y);
}

}  // namespace rapidmoe
