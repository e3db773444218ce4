// libFuzzer on the record reader: a file made of a valid header with the input laid over it is opened, and what is
// accepted is read by every kernel of this processor. make fuzz.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "jobs.h"
#include "runtime.h"

using namespace rapidmoe;

namespace {

constexpr int64_t kExperts = 2, kUnits = 19, kWidth = 128, kTokens = 20;

// A file in memory: header (with `mask` laid over it by xor), then records of the input, repeated.
int make_file(const ResidualShape& s, const uint8_t* mask, const uint8_t* data, size_t size, int64_t cut) {
  const int64_t record = RecordLayout(s.base_bits, s.residual_bits, s.width).bytes;
  std::vector<uint8_t> bytes(kHeaderBytes + s.experts * s.units * record);
  const ResidualHeader header = {{'R', 'M', 'O', 'E', 'R', 'E', 'S', '1'}, kFormatVersion, 0, uint32_t(s.experts),
                                 uint32_t(s.units), uint32_t(s.width), uint32_t(s.base_bits), uint32_t(s.residual_bits),
                                 uint32_t(kGroup), uint64_t(record)};
  std::memcpy(bytes.data(), &header, sizeof header);
  for (size_t i = 0; i < sizeof header; ++i) bytes[i] ^= mask[i];
  for (size_t i = kHeaderBytes; size > 0 && i < bytes.size(); ++i) bytes[i] = data[i % size];
  const int fd = memfd_create("records", MFD_CLOEXEC);
  const int64_t length = cut < 0 ? int64_t(bytes.size()) : cut % (int64_t(bytes.size()) + 64);
  if (fd < 0 || ftruncate(fd, length) != 0) __builtin_trap();
  const int64_t kept = std::min(length, int64_t(bytes.size()));
  if (pwrite(fd, bytes.data(), size_t(kept), 0) != kept) __builtin_trap();
  return fd;
}

void correct(const RowKernels& rows, int64_t store, int64_t tokens, bool exact) {
  static Pool pool(1);
  const std::vector<float> x(tokens * kWidth, 0.5f), weights(tokens * 2, 0.5f), u(tokens * 2 * kUnits, 0.25f);
  std::vector<int32_t> experts(tokens * 2);
  for (size_t i = 0; i < experts.size(); ++i) experts[i] = int32_t(i % 2);
  const std::unique_ptr<bool[]> mask(new bool[u.size()]);
  for (size_t i = 0; i < u.size(); ++i) mask[i] = tokens > 1 || i % 3;
  std::vector<float> y(tokens * kWidth);
  const uint32_t ticket = Jobs::instance().start(
      rows, pool, store, 0,
      {{tokens, 2, kWidth, x.data(), experts.data()}, weights.data(), u.data(), u.data(), u.data(), mask.get(), {}, exact, false});
  Jobs::instance().done(pool, ticket, y.data(), y.data());
}

}  // namespace

// Input: one byte of widths, one that says what to damage, 48 over the header, 8 of length, then records.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMask = sizeof(ResidualHeader), kStart = 2 + kMask + 8;
  if (size < kStart) return 0;
  const ResidualShape shape = {kExperts, kUnits, kWidth, 2 + data[0] % 3, data[0] & 64 ? 2 : 4};
  uint8_t mask[kMask] = {};
  if (data[1] & 1) std::memcpy(mask, data + 2, kMask);
  uint64_t cut = 0;
  std::memcpy(&cut, data + 2 + kMask, 8);
  const int fd = make_file(shape, mask, data + kStart, size - kStart, data[1] & 2 ? int64_t(cut >> 1) : -1);
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  try {
    const int64_t store =
        store_open(std::make_shared<ResidualStore>(std::vector<std::string>{path}, shape));
    for (size_t i = 0; i < kMask; ++i)
      if (mask[i]) __builtin_trap();  // a damaged header was accepted
    for (const char* isa : {"scalar", "avx2", "avx512", "avx512_bf16", "amx"})
      if (const RowKernels* rows = find_rows(isa)) {
        correct(*rows, store, 1, data[1] & 4);
        correct(*rows, store, kTokens, data[1] & 4);
      }
    store_close(store);
  } catch (const std::runtime_error& error) {
    if (std::string(error.what()).find(path) == std::string::npos) __builtin_trap();  // a message names its file
  }
  close(fd);
  return 0;
}
