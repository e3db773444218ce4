#include "base.h"

#include <algorithm>
#include <cstring>

namespace rapidmoe {
namespace {

// Calls body(active expert index, unit) over flat units [first, last) of the active experts.
template <class Body>
void for_units(int64_t first, int64_t last, int64_t units, Body body) {
  for (int64_t i = first; i < last; ++i) body(i / units, i % units);
}

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
  const auto dot = exact ? rows.dot_f32[layer.bits] : rows.dot_i8[layer.bits];
  const int64_t parts = std::min<int64_t>(64, (flat + 15) / 16);
  pool.run(parts, [&](int64_t part) {
    std::vector<const Activation*> x;
    std::vector<float> u, v;
    int64_t current = -1;
    for_units(flat * part / parts, flat * (part + 1) / parts, units, [&](int64_t a, int64_t j) {
      const int64_t begin = grouped.begin[a], n = grouped.begin[a + 1] - begin;
      if (a != current) {
        current = a;
        x.resize(n), u.resize(n), v.resize(n);
        for (int64_t i = 0; i < n; ++i) x[i] = acts[grouped.pairs[begin + i] / step.slots];
      }
      dot(layer.row(grouped.experts[a], 0, j), layer.width, n, x.data(), u.data());
      dot(layer.row(grouped.experts[a], 1, j), layer.width, n, x.data(), v.data());
      for (int64_t i = 0; i < n; ++i) {
        const int64_t at = grouped.pairs[begin + i] * units + j;
        u0[at] = u[i], v0[at] = v[i], h0[at] = silu(u[i]) * v[i];
      }
    });
  });
}

void base_down(const RowKernels& rows, Pool& pool, const BaseLayer& layer, const Step& step, const float* weights,
               const float* h0, float* y) {
  thread_local Groups groups;
  thread_local PartialSums sums;
  groups.fill(step, layer.experts);
  const Groups& grouped = groups;
  PartialSums& partial = sums;
  const int64_t units = layer.units, width = layer.width, flat = int64_t(grouped.experts.size()) * units;
  const int64_t parts = PartialSums::parts_for(flat, step.tokens, width);
  partial.start(parts, step.tokens, width);
  pool.run(parts, [&](int64_t part) {
    partial.clear(part);
    float* acc = partial.part(part);
    std::vector<float> w(width);
    for_units(flat * part / parts, flat * (part + 1) / parts, units, [&](int64_t a, int64_t j) {
      const int64_t begin = grouped.begin[a], n = grouped.begin[a + 1] - begin;
      const Row row = layer.row(grouped.experts[a], 2, j);
      if (n > 1) rows.dequantize[layer.bits](row, width, w.data());
      for (int64_t i = 0; i < n; ++i) {
        const int64_t p = grouped.pairs[begin + i];
        const float h = weights[p] * h0[p * units + j];
        float* out = acc + p / step.slots * width;
        if (n > 1) {
          rows.add_f32(w.data(), h, width, out);
        } else {
          rows.add[layer.bits](row, h, width, out);
        }
      }
    });
  });
  partial.add_into(pool, nullptr, y);
}

}  // namespace rapidmoe
