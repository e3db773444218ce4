// Self-checking test of the compute code without XLA and Python, for the sanitizers: make sanitize.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <thread>

#include "base.h"
#include "jobs.h"
#include "runtime.h"

using namespace rapidmoe;

namespace {

std::mt19937 rng(7);

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

std::vector<float> normal(size_t n) {
  std::normal_distribution<float> d;
  std::vector<float> out(n);
  for (float& v : out) v = d(rng);
  return out;
}

std::vector<uint8_t> bytes(size_t n) {
  std::vector<uint8_t> out(n);
  for (uint8_t& v : out) v = uint8_t(rng());
  return out;
}

// Half floats between 2^-6 and 2^-5: small normal numbers.
std::vector<uint16_t> halves(size_t n) {
  std::vector<uint16_t> out(n);
  for (uint16_t& v : out) v = uint16_t(0x2400 | (rng() & 1023));
  return out;
}

bool near(const std::vector<float>& a, const std::vector<float>& b, float bound) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::fabs(a[i] - b[i]) <= bound * (1 + std::fabs(b[i])))) return false;
  return true;
}

// Every row kernel of a table against the scalar one, on buffers that end where the row ends.
void test_rows(const RowKernels& rows) {
  const RowKernels& scalar = rows_scalar();
  for (int64_t d : {64, 192, 1088, 4224}) {
    const int64_t n = 5, padded = padded_width(d), groups = padded / 64;
    const std::vector<float> x = normal(d * n);
    std::vector<int8_t> q(padded * n * 3);
    std::vector<float> scale(groups * n), sum(groups * n);
    std::vector<uint16_t> half(d * n);
    std::vector<Activation> tokens(n);
    std::vector<const Activation*> pointers(n);
    for (int t = 0; t < n; ++t) {
      int8_t* codes = &q[t * padded * 3];
      rows.quantize(&x[t * d], d, codes, codes + padded, codes + 2 * padded, &scale[t * groups], &sum[t * groups]);
      if (rows.round) rows.round(&x[t * d], d, &half[t * d]);
      tokens[t] = {&x[t * d],          codes,           codes + padded, codes + 2 * padded, &scale[t * groups],
                   &sum[t * groups], &half[t * d]};
      pointers[t] = &tokens[t];
    }
    for (int bits : {2, 3, 4}) {
      const std::vector<uint8_t> codes = bytes(row_bytes(bits, d)), others = bytes(row_bytes(bits, d));
      const std::vector<uint16_t> s = halves(d / 64), o = halves(d / 64);
      for (const uint16_t* offset : {o.data(), (const uint16_t*)nullptr}) {
        const Row row = {codes.data(), s.data(), offset}, other = {others.data(), s.data(), offset};
        std::vector<float> a(2 * n), b(2 * n), w(d), v(d);
        rows.dot_i8[bits](row, other, d, n, pointers.data(), a.data(), a.data() + n);
        scalar.dot_i8[bits](row, other, d, n, pointers.data(), b.data(), b.data() + n);
        require(near(a, b, 1e-4f), "dot_i8");
        rows.dot_f32[bits](row, d, n, pointers.data(), a.data());
        scalar.dot_f32[bits](row, d, n, pointers.data(), b.data());
        require(near(a, b, 1e-4f), "dot_f32");
        for (int64_t count : {1, 16, 37}) {
          const std::vector<uint8_t> packed = bytes(count * row_bytes(bits, d));
          std::vector<Row> many(count);
          for (int64_t r = 0; r < count; ++r) many[r] = {&packed[r * row_bytes(bits, d)], s.data(), offset};
          std::vector<float> p(n * count), t(n * count);
          std::vector<float*> to(n), wanted(n);
          for (int i = 0; i < n; ++i) to[i] = &p[i * count], wanted[i] = &t[i * count];
          rows.dot_many[bits](many.data(), count, d, n, pointers.data(), to.data());
          scalar.dot_many[bits](many.data(), count, d, n, pointers.data(), wanted.data());
          require(near(p, t, rows.round ? 0.2f : 1e-4f), "dot_many");
          const std::vector<float> factors = normal(n * count);
          for (int64_t first = 0; first < d / 64; first += kStrip) {
            const int64_t columns = std::min(d - first * 64, kStrip * 64);
            const More more = {first ? many.data() : nullptr, bits};
            std::vector<float> sums(n * columns, 1.0f), right(n * columns, 1.0f);
            for (int i = 0; i < n; ++i) to[i] = &sums[i * columns], wanted[i] = &right[i * columns];
            rows.sum_many[bits](many.data(), more, count, d, first, n, factors.data(), count, to.data());
            scalar.sum_many[bits](many.data(), more, count, d, first, n, factors.data(), count, wanted.data());
            require(near(sums, right, 2e-2f), "sum_many");
          }
        }
        rows.dequantize[bits](row, d, w.data());
        scalar.dequantize[bits](row, d, v.data());
        require(near(w, v, 1e-6f), "dequantize");
        rows.add[bits](row, 0.5f, d, w.data());
        scalar.add[bits](row, 0.5f, d, v.data());
        require(near(w, v, 1e-5f), "add");
        const std::vector<uint8_t> many = bytes(kBlock * row_bytes(bits, d));
        const std::vector<float> coefficients = normal(kBlock);
        Row block[kBlock];
        for (int r = 0; r < kBlock; ++r) block[r] = {&many[r * row_bytes(bits, d)], s.data(), offset};
        rows.add_block_fine[bits](block, coefficients.data(), d, w.data());
        scalar.add_block_fine[bits](block, coefficients.data(), d, v.data());
        require(near(w, v, 1e-4f), "add_block_fine");
        rows.add_block[bits](block, coefficients.data(), d, w.data());
        scalar.add_block[bits](block, coefficients.data(), d, v.data());
        require(near(w, v, 1e-4f), "add_block");
      }
    }
    std::vector<float> a(d), b(d);
    std::vector<float> wide = x;
    for (float& value : wide) value *= 40;
    rows.silu_mul(wide.data(), x.data(), d, a.data());
    scalar.silu_mul(wide.data(), x.data(), d, b.data());
    require(near(a, b, 1e-6f), "silu_mul");
  }
}

std::string write_records(const ResidualShape& s, const char* magic = "RMOERES1") {
  std::string path = (std::filesystem::temp_directory_path() / "rapidmoe_XXXXXX").string();
  const int fd = mkstemp(path.data());
  const int64_t record = RecordLayout(s.base_bits, s.residual_bits, s.width).bytes;
  std::vector<uint8_t> data(kHeaderBytes);
  ResidualHeader h = {{}, kFormatVersion, 0, uint32_t(s.experts), uint32_t(s.units), uint32_t(s.width),
                      uint32_t(s.base_bits), uint32_t(s.residual_bits), uint32_t(kGroup), uint64_t(record)};
  std::copy(magic, magic + 8, h.magic);
  std::copy((uint8_t*)&h, (uint8_t*)&h + sizeof h, data.begin());
  const RecordLayout at(s.base_bits, s.residual_bits, s.width);
  for (int64_t i = 0; i < s.experts * s.units; ++i) {
    std::vector<uint8_t> one = bytes(record);
    const std::vector<uint16_t> scales = halves((record - at.r1_scale) / 2);
    std::copy((uint8_t*)scales.data(), (uint8_t*)(scales.data() + scales.size()), one.begin() + at.r1_scale);
    data.insert(data.end(), one.begin(), one.end());
  }
  require(write(fd, data.data(), data.size()) == ssize_t(data.size()), "write");
  close(fd);
  return path;
}

struct Inputs {
  std::vector<float> x, weights, u0, v0, h0;
  std::vector<int32_t> experts;
  std::unique_ptr<bool[]> mask;
  Inputs(const ResidualShape& s, int64_t tokens, int64_t slots)
      : x(normal(tokens * s.width)), weights(normal(tokens * slots)), u0(normal(tokens * slots * s.units)),
        v0(normal(u0.size())), h0(normal(u0.size())), experts(tokens * slots), mask(new bool[u0.size()]) {
    for (size_t i = 0; i < experts.size(); ++i) experts[i] = int32_t((i + i / slots) % (s.experts + 1)) - 1;
    for (size_t i = 0; i < u0.size(); ++i) mask[i] = rng() % 3 == 0;
  }
  ResidualRequest request(const ResidualShape& s, int64_t tokens, int64_t slots, bool exact) const {
    return {{tokens, slots, s.width, x.data(), experts.data()}, weights.data(), u0.data(), v0.data(), h0.data(),
            mask.get(), {}, exact, false, exact ? 0.0f : 0.5f};
  }
};

// Jobs from several threads at once, with the base kernels in between, on pools of several sizes.
void test_jobs() {
  const ResidualShape shape = {5, 33, 192, 3, 4};
  const std::string path = write_records(shape);
  const int64_t store = store_open(std::make_shared<ResidualStore>(std::vector<std::string>{path}, shape));
  const int64_t rows = shape.experts * 3 * shape.units;
  const std::vector<uint8_t> codes = bytes(rows * row_bytes(3, shape.width));
  const std::vector<uint16_t> s = halves(rows * 3), o = halves(rows * 3);
  const BaseLayer layer = {codes.data(), s.data(), o.data(), shape.experts, shape.units, shape.width, 3};
  std::vector<std::vector<float>> results;
  const Inputs in(shape, 6, 2);
  for (int threads : {1, 2, 4}) {
    Pool pool(threads);
    std::vector<std::thread> callers;
    std::atomic<int> bad{0};
    std::vector<float> first(6 * shape.width);
    for (int c = 0; c < 3; ++c)
      callers.emplace_back([&, c] {
        for (int round = 0; round < 10; ++round) {
          std::vector<float> y(6 * shape.width), base(6 * shape.width), u(in.u0.size()), v(u), h(u);
          const ResidualRequest request = in.request(shape, 6, 2, round % 2);
          base_gate_up(active_rows(), pool, layer, request.step, round % 2, u.data(), v.data(), h.data());
          const uint32_t ticket = Jobs::instance().start(active_rows(), pool, store, 0, request);
          base_down(active_rows(), pool, layer, request.step, round % 2, request.weights, request.h0, base.data());
          Jobs::instance().done(pool, ticket, base.data(), y.data());
          if (c == 0 && round == 0) first = y;
          for (float value : y) bad += !std::isfinite(value);
        }
      });
    for (std::thread& t : callers) t.join();
    require(bad == 0, "finite results");
    results.push_back(first);
  }
  require(results[0] == results[1] && results[0] == results[2], "result independent of the thread count");
  require(Jobs::instance().in_flight() == 0, "no job left");

  Pool pool(2);
  int refused = 0;
  auto refuses = [&](auto body) {
    try {
      body();
    } catch (const std::exception&) {
      ++refused;
    }
  };
  std::vector<float> y(6 * shape.width);
  refuses([&] { Jobs::instance().start(active_rows(), pool, store, 1, in.request(shape, 6, 2, true)); });
  refuses([&] { Jobs::instance().done(pool, 99, y.data(), y.data()); });
  refuses([&] { pool.run(8, [](int64_t part) { if (part == 3) throw std::runtime_error("part 3"); }); });
  refuses([&] { pool.resize(0); });
  store_close(store);
  refuses([&] { Jobs::instance().start(active_rows(), pool, store, 0, in.request(shape, 6, 2, true)); });
  refuses([&] { select_rows("none"); });
  require(truncate(path.c_str(), 5000) == 0, "truncate");
  refuses([&] { RecordFile(path, shape, 0); });
  const std::string other = write_records(shape, "NOTMAGIC");
  refuses([&] { RecordFile(other, shape, 0); });
  refuses([&] { RecordFile("/nonexistent/000.bin", shape, 0); });
  require(refused == 9, "every bad request refused");
  unlink(path.c_str());
  unlink(other.c_str());
}

}  // namespace

int main() {
  for (const char* name : {"scalar", "avx2", "avx512", "avx512_bf16", "amx"}) {
    const RowKernels* rows = find_rows(name);
    std::printf("%s: %s\n", name, rows ? "tested" : "not on this processor");
    if (rows) test_rows(*rows);
  }
  test_jobs();
  std::printf("ok\n");
}
