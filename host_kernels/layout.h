// The packed layout of codes and of one residual record. Python's side is rapidmoe_jax/quant.py and
// rapidmoe_jax/layout.py; tests/test_layout.py compares the two byte by byte.
//
// Plane of n bits (n = 1, 2, 4), a row of D codes, D a multiple of 64: group g of 64 codes takes bytes
// [8ng, 8n(g+1)); code e of the group sits in byte e % 8n of it, at bits [n * (e / 8n), ...) of that byte.
// A row of 2- or 4-bit codes is one plane. A row of 3-bit codes is the 2-bit plane of the low bits,
// followed by the 1-bit plane of the high bits. Scales and offsets are IEEE half, one a group.
#pragma once
#include <cstdint>

namespace rapidmoe {

constexpr int64_t kGroup = 64;         // weights that share a scale
constexpr int64_t kRecordAlign = 64;   // a record starts on a cache line
constexpr int64_t kHeaderBytes = 4096; // records of a residual file start on a page

constexpr int64_t row_bytes(int bits, int64_t d) { return d * bits / 8; }
constexpr int64_t scale_bytes(int64_t d) { return d / kGroup * 2; }

// One (layer, expert, unit), in this order: codes R1 (r bits), R3 (r), B2 (b), R2 (r); then scales R1,
// R3, B2, offsets B2, scales R2; then zeros up to kRecordAlign.
// Reconstruction: base w = scale * code + offset; residual w = scale * (code - (2^r - 1) / 2).
struct RecordLayout {
  int64_t r1, r3, b2, r2, r1_scale, r3_scale, b2_scale, b2_offset, r2_scale, bytes;
  constexpr RecordLayout(int base_bits, int residual_bits, int64_t d)
      : r1(0),
        r3(r1 + row_bytes(residual_bits, d)),
        b2(r3 + row_bytes(residual_bits, d)),
        r2(b2 + row_bytes(base_bits, d)),
        r1_scale(r2 + row_bytes(residual_bits, d)),
        r3_scale(r1_scale + scale_bytes(d)),
        b2_scale(r3_scale + scale_bytes(d)),
        b2_offset(b2_scale + scale_bytes(d)),
        r2_scale(b2_offset + scale_bytes(d)),
        bytes((r2_scale + scale_bytes(d) + kRecordAlign - 1) / kRecordAlign * kRecordAlign) {}
};
static_assert(RecordLayout(3, 4, 2048).bytes == 4160, "3+4 bits at D 2048: 3840 of codes, 320 of scales");
static_assert(RecordLayout(2, 2, 64).bytes == 128, "2+2 bits at D 64: 64 of codes, 10 of scales, padding");

// First bytes of a residual file; the rest of the header page is zero.
struct ResidualHeader {
  char magic[8];  // "RMOERES1"
  uint32_t version, layer, experts, units, width, base_bits, residual_bits, group_size;
  uint64_t record_bytes;
};
static_assert(sizeof(ResidualHeader) == 48, "header is 48 bytes");
constexpr uint32_t kFormatVersion = 1;

}  // namespace rapidmoe
