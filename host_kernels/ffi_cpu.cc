// XLA:CPU handlers: check shapes, read dimensions from the buffers, call the kernels. The base arrays of all
// layers stay one operand each, indexed here, so that a scan over layers does not copy a layer's weights.
#include "ffi_cpu.h"

#include <algorithm>
#include <exception>
#include <string>

#include "base.h"
#include "jobs.h"
#include "runtime.h"

namespace rapidmoe {
namespace {

namespace ffi = xla::ffi;
using F32 = ffi::Buffer<ffi::F32>;
using S32 = ffi::Buffer<ffi::S32>;
using U8 = ffi::Buffer<ffi::U8>;
using F16 = ffi::Buffer<ffi::F16>;
using Pred = ffi::Buffer<ffi::PRED>;

const uint16_t* halves(const F16& b) { return reinterpret_cast<const uint16_t*>(b.untyped_data()); }

std::string shape_of(ffi::Span<const int64_t> dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

ffi::Error wrong(const char* op, const char* what, ffi::Span<const int64_t> got, const std::string& wanted) {
  return ffi::Error::InvalidArgument(std::string(op) + "(" + what + "): got shape " + shape_of(got) + ", wanted " +
                                     wanted);
}

// Run body; what it throws becomes the call's error.
template <class Body>
ffi::Error guarded(const char* op, Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(std::string(op) + ": " + e.what());
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string(op) + ": " + e.what());
  }
}

// codes [L, E, 3, F, row bytes], scale and offset [L, E, 3, F, D / 64]
ffi::Error base_layer(const char* op, int64_t bits, S32 layer, U8 codes, F16 scale, F16 offset, BaseLayer* out) {
  const auto c = codes.dimensions(), s = scale.dimensions();
  if (c.size() != 5 || c[2] != 3) return wrong(op, "codes", c, "[L, E, 3, F, D * bits / 8]");
  if (s.size() != 5 || !std::equal(c.begin(), c.begin() + 4, s.begin()))
    return wrong(op, "scale", s, "[L, E, 3, F, D / 64] with the L, E, F of codes");
  if (offset.element_count() != scale.element_count()) return wrong(op, "offset", offset.dimensions(), shape_of(s));
  if (bits < 2 || bits > 4) return ffi::Error::InvalidArgument(std::string(op) + ": bits must be 2, 3 or 4");
  const int64_t width = s[4] * kGroup, l = layer.typed_data()[0];
  if (c[4] != row_bytes(int(bits), width))
    return wrong(op, "codes", c, "last axis " + std::to_string(row_bytes(int(bits), width)));
  if (l < 0 || l >= c[0])
    return ffi::Error::InvalidArgument(std::string(op) + ": layer " + std::to_string(l) + " of " +
                                       std::to_string(c[0]));
  const int64_t rows = c[1] * 3 * c[3];
  *out = {codes.typed_data() + l * rows * c[4], halves(scale) + l * rows * s[4], halves(offset) + l * rows * s[4],
          c[1], c[3], width, int(bits)};
  return ffi::Error::Success();
}

ffi::Error GateUp(int64_t bits, bool exact, F32 x, S32 experts, S32 layer, U8 codes, F16 scale, F16 offset,
                  ffi::Result<F32> u0, ffi::Result<F32> v0, ffi::Result<F32> h0) {
  const char* op = "rapidmoe_base_gate_up";
  BaseLayer base;
  if (ffi::Error e = base_layer(op, bits, layer, codes, scale, offset, &base); e.failure()) return e;
  const auto xd = x.dimensions(), ed = experts.dimensions();
  if (xd.size() != 2 || xd[1] != base.width) return wrong(op, "x", xd, "[T, " + std::to_string(base.width) + "]");
  if (ed.size() != 2 || ed[0] != xd[0]) return wrong(op, "expert_ids", ed, "[T, k]");
  return guarded(op, [&] {
    base_gate_up(active_rows(), Pool::instance(), base, {xd[0], ed[1], xd[1], x.typed_data(), experts.typed_data()},
                 exact, u0->typed_data(), v0->typed_data(), h0->typed_data());
  });
}

ffi::Error Down(int64_t bits, bool exact, F32 h0, S32 experts, F32 weights, S32 layer, U8 codes, F16 scale, F16 offset,
                ffi::Result<F32> y) {
  const char* op = "rapidmoe_base_down";
  BaseLayer base;
  if (ffi::Error e = base_layer(op, bits, layer, codes, scale, offset, &base); e.failure()) return e;
  const auto hd = h0.dimensions(), ed = experts.dimensions();
  if (hd.size() != 3 || hd[2] != base.units) return wrong(op, "h0", hd, "[T, k, " + std::to_string(base.units) + "]");
  if (ed.size() != 2 || ed[0] != hd[0] || ed[1] != hd[1]) return wrong(op, "expert_ids", ed, "[T, k] of h0");
  if (weights.element_count() != experts.element_count())
    return wrong(op, "expert_weights", weights.dimensions(), shape_of(ed));
  return guarded(op, [&] {
    base_down(active_rows(), Pool::instance(), base, {hd[0], hd[1], base.width, nullptr, experts.typed_data()},
              exact, weights.typed_data(), h0.typed_data(), y->typed_data());
  });
}

ffi::Error Start(int64_t store, bool exact, bool replaces, float limit, F32 x, S32 experts, F32 weights, F32 u0, F32 v0, F32 h0, Pred mask,
                 S32 layer, ffi::Result<ffi::Buffer<ffi::U32>> ticket) {
  const char* op = "rapidmoe_residual_start";
  const auto xd = x.dimensions(), md = mask.dimensions();
  if (xd.size() != 2) return wrong(op, "x", xd, "[T, D]");
  if (md.size() != 3 || md[0] != xd[0]) return wrong(op, "critical_mask", md, "[T, k, F]");
  if (experts.element_count() != size_t(md[0] * md[1])) return wrong(op, "expert_ids", experts.dimensions(), "[T, k]");
  if (weights.element_count() != experts.element_count())
    return wrong(op, "expert_weights", weights.dimensions(), "[T, k]");
  for (const F32* value : {&u0, &v0, &h0})
    if (value->element_count() != mask.element_count()) return wrong(op, "u0, v0, h0", value->dimensions(), shape_of(md));
  return guarded(op, [&] {
    const RecordLayer records = store_find(store)->layer(layer.typed_data()[0]);
    if (records.width != xd[1] || records.units != md[2])
      throw std::invalid_argument("x has width " + std::to_string(xd[1]) + " and the mask " + std::to_string(md[2]) +
                                  " units, the checkpoint " + std::to_string(records.width) + " and " +
                                  std::to_string(records.units));
    const ResidualRequest request = {{xd[0], md[1], xd[1], x.typed_data(), experts.typed_data()},
                                     weights.typed_data(), u0.typed_data(), v0.typed_data(), h0.typed_data(),
                                     mask.typed_data(), {}, exact, replaces, limit};
    ticket->typed_data()[0] =
        Jobs::instance().start(active_rows(), Pool::instance(), store, layer.typed_data()[0], request);
  });
}

ffi::Error Done(ffi::Buffer<ffi::U32> ticket, F32 y_base, ffi::Result<F32> y, ffi::Result<S32> stats) {
  return guarded("rapidmoe_residual_done", [&] {
    const ResidualStats s = Jobs::instance().done(Pool::instance(), ticket.typed_data()[0], y_base.typed_data(),
                                                  y->typed_data());
    stats->typed_data()[0] = int32_t(s.records);
    stats->typed_data()[1] = int32_t(s.unit_tokens);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGateUp, GateUp,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("bits")
                           .Attr<bool>("exact")
                           .Arg<F32>()   // x [T, D]
                           .Arg<S32>()   // expert_ids [T, k]
                           .Arg<S32>()   // layer []
                           .Arg<U8>()    // codes
                           .Arg<F16>()   // scale
                           .Arg<F16>()   // offset
                           .Ret<F32>()   // u0 [T, k, F]
                           .Ret<F32>()   // v0
                           .Ret<F32>()); // h0
XLA_FFI_DEFINE_HANDLER(kDown, Down,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("bits")
                           .Attr<bool>("exact")
                           .Arg<F32>()   // h0 [T, k, F]
                           .Arg<S32>()   // expert_ids [T, k]
                           .Arg<F32>()   // expert_weights [T, k]
                           .Arg<S32>()   // layer []
                           .Arg<U8>()    // codes
                           .Arg<F16>()   // scale
                           .Arg<F16>()   // offset
                           .Ret<F32>()); // y_base [T, D]
XLA_FFI_DEFINE_HANDLER(kStart, Start,
                       ffi::Ffi::Bind()
                           .Attr<int64_t>("store")
                           .Attr<bool>("exact")
                           .Attr<bool>("replaces")
                           .Attr<float>("limit")
                           .Arg<F32>()   // x [T, D]
                           .Arg<S32>()   // expert_ids [T, k]
                           .Arg<F32>()   // expert_weights [T, k]
                           .Arg<F32>()   // u0 [T, k, F]
                           .Arg<F32>()   // v0
                           .Arg<F32>()   // h0
                           .Arg<Pred>()  // critical_mask [T, k, F]
                           .Arg<S32>()   // layer []
                           .Ret<ffi::Buffer<ffi::U32>>());  // ticket []
XLA_FFI_DEFINE_HANDLER(kDone, Done,
                       ffi::Ffi::Bind()
                           .Arg<ffi::Buffer<ffi::U32>>()  // ticket []
                           .Arg<F32>()                    // y_base [T, D]
                           .Ret<F32>()                    // y [T, D]
                           .Ret<S32>());                  // [records read, unit-tokens corrected]

std::vector<std::pair<const char*, void*>> cpu_handlers() {
  return {{"rapidmoe_base_gate_up", reinterpret_cast<void*>(kGateUp)},
          {"rapidmoe_base_down", reinterpret_cast<void*>(kDown)},
          {"rapidmoe_residual_start", reinterpret_cast<void*>(kStart)},
          {"rapidmoe_residual_done", reinterpret_cast<void*>(kDone)}};
}

}  // namespace rapidmoe
