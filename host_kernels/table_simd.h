// The table of one vector trait. Included by rows_avx2.cc and rows_avx512.cc, inside their target pragmas.
#include "block_simd.h"
#include "many_simd.h"
#include "weights_simd.h"

namespace rapidmoe {
namespace {

template <class V>
const RowKernels* simd_table(const char* name) {
  static const RowKernels table = {
      name,
      quantize<V>,
      {nullptr, nullptr, dot_i8<V, 2>, dot_i8<V, 3>, dot_i8<V, 4>},
      {nullptr, nullptr, dot_f32<V, 2>, dot_f32<V, 3>, dot_f32<V, 4>},
      {nullptr, nullptr, dequantize<V, 2>, dequantize<V, 3>, dequantize<V, 4>},
      {nullptr, nullptr, add<V, 2>, add<V, 3>, add<V, 4>},
      {nullptr, nullptr, add_block<V, 2, false>, add_block<V, 3, false>, add_block<V, 4, false>},
      {nullptr, nullptr, add_block<V, 2, true>, add_block<V, 3, true>, add_block<V, 4, true>},
      {nullptr, nullptr, dot_many<V, 2>, dot_many<V, 3>, dot_many<V, 4>},
      {nullptr, nullptr, sum_many<V, 2>, sum_many<V, 3>, sum_many<V, 4>},
      silu_mul<V>};
  return &table;
}

}  // namespace
}  // namespace rapidmoe
