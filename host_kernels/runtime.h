// The instruction set in use: one choice a process.
#pragma once
#include "rows.h"

namespace rapidmoe {

// The table in use; the best one of this machine until select_rows() says otherwise.
const RowKernels& active_rows();
// "auto", "scalar", "avx2", "avx512", "avx512_bf16" or "amx". Throws std::invalid_argument if this machine does not have it.
void select_rows(const char* name);

}  // namespace rapidmoe
