#include "base.h"

#include <algorithm>
#include <cstring>

namespace rapidmoe {
namespace {

constexpr int64_t kAheadRows = 4;  // gate/up rows are fetched this long before their use

}  // namespace

void base_gate_up(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, bool exact, float* u0,
                  float* v0, float* h0) {
  thread_local Groups groups;
  thread_local Activations activations;
  groups.fill(step, layer.experts);
  activations.fill(rows, pool, step, exact);
  const Groups& grouped = groups;  // workers must see the caller's copy, not their own thread's
  const Activations& acts = activations;
  const int64_t units = layer.units, flat = int64_t(grouped.experts.size()) * units;
  for (int64_t p = 0; p < step.pairs(); ++p)
    if (step.experts[p] < 0)
      for (float* out : {u0, v0, h0}) std::memset(out + p * units, 0, units * sizeof(float));
  const int64_t parts = std::min<int64_t>(256, (flat + 7) / 8);
  pool.run(parts, [&](int64_t part) {
    thread_local std::vector<const Activation*> x;
    thread_local std::vector<float> u, v;
    const int64_t last = flat * (part + 1) / parts;
    for (int64_t first = flat * part / parts; first < last;) {  // units first .. end - 1 are of one expert
      const int64_t a = first / units, end = std::min(last, (a + 1) * units);
      const int64_t begin = grouped.begin[a], n = grouped.begin[a + 1] - begin;
      x.resize(n), u.resize(n), v.resize(n);
      for (int64_t i = 0; i < n; ++i) x[i] = acts[grouped.pairs[begin + i] / step.slots];
      for (int64_t j = first % units; j < first % units + end - first; ++j) {
        const Row gate = layer.row(grouped.experts[a], 0, j, kAheadRows);
        const Row up = layer.row(grouped.experts[a], 1, j, kAheadRows);
        if (exact) {
          rows.dot_f32[layer.bits](gate, layer.width, n, x.data(), u.data());
          rows.dot_f32[layer.bits](up, layer.width, n, x.data(), v.data());
        } else {
          rows.dot_i8[layer.bits](gate, up, layer.width, n, x.data(), u.data(), v.data());
        }
        for (int64_t i = 0; i < n; ++i) {
          const int64_t at = grouped.pairs[begin + i] * units + j;
          u0[at] = u[i], v0[at] = v[i];
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = grouped.pairs[begin + i] * units + first % units;
        rows.silu_mul(u0 + at, v0 + at, end - first, h0 + at);
      }
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
