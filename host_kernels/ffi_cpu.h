// The XLA:CPU custom call targets: (name, handler).
#pragma once
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace rapidmoe {
std::vector<std::pair<const char*, void*>> cpu_handlers();
}  // namespace rapidmoe
