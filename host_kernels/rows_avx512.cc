// Row kernels for AVX-512 with VNNI. See rows_avx2.cc for the order of the includes.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")
#include "avx512.h"
#include "table_simd.h"

namespace rapidmoe {

const RowKernels* rows_avx512() {
  static const bool have = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
  return have ? simd_table<Avx512>("avx512") : nullptr;
}

}  // namespace rapidmoe
#else
namespace rapidmoe {
const RowKernels* rows_avx512() { return nullptr; }
}  // namespace rapidmoe
#endif
