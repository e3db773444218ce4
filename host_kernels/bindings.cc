// Python module _host: the custom call targets, the pool, residual stores, and what tests and benchmarks call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <numeric>

#include "ffi_cpu.h"
#include "jobs.h"
#include "nested.h"
#include "runtime.h"
#include "topology.h"

namespace py = pybind11;
using namespace rapidmoe;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// The callback executor: start and done at once, on numpy arrays. Returns (delta [T, D], records, unit_tokens).
py::tuple residual_delta(int64_t store, int64_t layer, bool exact, float limit, Array<float> x, Array<int32_t> experts,
                         Array<float> weights, Array<float> u0, Array<float> v0, Array<float> h0, Array<bool> mask) {
  const RecordLayer records = store_find(store)->layer(layer);
  if (x.ndim() != 2 || mask.ndim() != 3 || x.shape(1) != records.width || mask.shape(2) != records.units ||
      mask.shape(0) != x.shape(0) || experts.size() != mask.shape(0) * mask.shape(1) ||
      weights.size() != experts.size() || u0.size() != mask.size() || v0.size() != mask.size() ||
      h0.size() != mask.size())
    throw std::invalid_argument("residual_delta: x [T, " + std::to_string(records.width) + "], mask, u0, v0, h0 [T, k, " +
                                std::to_string(records.units) + "], expert_ids and weights [T, k] wanted");
  Array<float> out({x.shape(0), x.shape(1)});
  std::fill_n(out.mutable_data(), out.size(), 0.0f);
  ResidualRequest request = {{x.shape(0), mask.shape(1), x.shape(1), x.data(), experts.data()},
                             weights.data(), u0.data(), v0.data(), h0.data(), mask.data(), records, exact, false, limit};
  ResidualStats stats;
  float* delta = out.mutable_data();
  {
    py::gil_scoped_release release;
    Jobs& jobs = Jobs::instance();
    const uint32_t ticket = jobs.start(active_rows(), Pool::instance(), store, layer, request);
    stats = jobs.done(Pool::instance(), ticket, delta, delta);
  }
  return py::make_tuple(out, stats.records, stats.unit_tokens);
}

// Weights of packed rows, as the kernels read them: ties Python's packing to C++ in tests.
Array<float> dequantize_rows(int bits, Array<uint8_t> codes, Array<uint16_t> scale, py::object offset) {
  const int64_t n = codes.shape(0), d = scale.shape(1) * kGroup;
  if (bits < 2 || bits > 4 || codes.shape(1) != row_bytes(bits, d)) throw std::invalid_argument("dequantize_rows: shapes");
  const bool symmetric = offset.is_none();
  Array<uint16_t> offsets = symmetric ? scale : offset.cast<Array<uint16_t>>();
  Array<float> out({n, d});
  for (int64_t i = 0; i < n; ++i)
    active_rows().dequantize[bits](
        {codes.data(i, 0), scale.data(i, 0), symmetric ? nullptr : offsets.data(i, 0)}, d, out.mutable_data(i, 0));
  return out;
}

// One expert [3, F, D] without data: (codes, scale, offset, norms [F, 4], records, sums [F, 3]); scales as bits of half.
py::tuple split_expert(Array<float> weights, int base_bits, int residual_bits) {
  if (weights.ndim() != 3 || weights.shape(0) != 3 || weights.shape(2) % kGroup || base_bits < 2 || base_bits > 4 ||
      (residual_bits != 2 && residual_bits != 4))
    throw std::invalid_argument("split_expert: weights [3, F, D] with D a multiple of 64, bits 2-4 and 2 or 4 wanted");
  const int64_t units = weights.shape(1), d = weights.shape(2), groups = d / kGroup;
  const int64_t record = RecordLayout(base_bits, residual_bits, d).bytes;
  Array<uint8_t> codes({int64_t(3), units, row_bytes(base_bits, d)}), records({units, record});
  Array<uint16_t> scale({int64_t(3), units, groups}), offset({int64_t(3), units, groups});
  Array<float> norms({units, int64_t(4)});
  Array<double> sums({units, int64_t(3)});
  std::fill_n(records.mutable_data(), records.size(), uint8_t(0));
  const NestedSplit job = {weights.data(), units, d, base_bits, residual_bits, codes.mutable_data(),
                           scale.mutable_data(), offset.mutable_data(), records.mutable_data(), norms.mutable_data(),
                           sums.mutable_data()};
  constexpr int64_t kPart = 8;  // units
  {
    py::gil_scoped_release release;
    Pool::instance().run((units + kPart - 1) / kPart, [&](int64_t part) {
      split_nested(job, part * kPart, std::min(units, (part + 1) * kPart));
    });
  }
  return py::make_tuple(codes, scale, offset, norms, records, sums);
}

// Bytes per second of a plain vector sum over `data`, all threads of the pool, best of `repeats`.
double read_bandwidth(Array<uint8_t> data, int repeats) {
  const int64_t words = data.size() / 8, parts = Pool::instance().threads() * 8;
  const uint64_t* p = reinterpret_cast<const uint64_t*>(data.data());
  std::vector<uint64_t> sums(parts);
  double best = 0;
  [[maybe_unused]] volatile uint64_t keep;  // so that the sums are not optimised away
  py::gil_scoped_release release;
  for (int r = 0; r < repeats; ++r) {
    const auto start = std::chrono::steady_clock::now();
    Pool::instance().run(parts, [&](int64_t part) {
      uint64_t lane[8] = {};
      const int64_t last = words * (part + 1) / parts;
      int64_t i = words * part / parts;
      for (; i + 8 <= last; i += 8)
        for (int k = 0; k < 8; ++k) lane[k] += p[i + k];
      sums[part] = std::accumulate(lane, lane + 8, uint64_t(0));
    });
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    keep = std::accumulate(sums.begin(), sums.end(), uint64_t(0));
    best = std::max(best, double(words * 8) / seconds);
  }
  return best;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.attr("XLA_FFI_VERSION") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("GROUP_SIZE") = kGroup;
  m.attr("HEADER_BYTES") = kHeaderBytes;
  m.attr("FORMAT_VERSION") = kFormatVersion;
  m.def("registrations", [] {
    py::dict out;
    for (const auto& [name, handler] : cpu_handlers()) out[name] = py::capsule(handler);
    return out;
  });
  m.def("set_threads", [](int n) { Pool::instance().resize(n); }, py::call_guard<py::gil_scoped_release>());
  m.def("threads", [] { return Pool::instance().threads(); });
  m.def("available_cores", &available_cores);
  m.def("cgroup_cpus", &cgroup_cpus);
  m.def("select_isa", [](const std::string& name) { select_rows(name.c_str()); });
  m.def("isa", [] { return active_rows().name; });
  m.def("has_isa", [](const std::string& name) { return find_rows(name.c_str()) != nullptr; });
  m.def("record_layout", [](int base_bits, int residual_bits, int64_t width) {
    const RecordLayout r(base_bits, residual_bits, width);
    using namespace py::literals;
    return py::dict("r1"_a = r.r1, "r3"_a = r.r3, "b2"_a = r.b2, "r2"_a = r.r2, "r1_scale"_a = r.r1_scale,
                    "r3_scale"_a = r.r3_scale, "b2_scale"_a = r.b2_scale, "b2_offset"_a = r.b2_offset,
                    "r2_scale"_a = r.r2_scale, "bytes"_a = r.bytes);
  });
  m.def("open_store", [](const std::vector<std::string>& paths, int64_t experts, int64_t units, int64_t width,
                         int base_bits, int residual_bits) {
    return store_open(std::make_shared<ResidualStore>(
        paths, ResidualShape{experts, units, width, base_bits, residual_bits}));
  });
  m.def("close_store", &store_close);
  m.def("residual_delta", &residual_delta);
  m.def("jobs_in_flight", [] { return Jobs::instance().in_flight(); });
  m.def("dequantize_rows", &dequantize_rows);
  m.def("split_expert", &split_expert);
  m.def("read_bandwidth", &read_bandwidth);
}
