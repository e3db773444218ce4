#include "runtime.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace rapidmoe {
namespace {
std::atomic<const RowKernels*> chosen{nullptr};
}  // namespace

const RowKernels& active_rows() {
  const RowKernels* rows = chosen.load(std::memory_order_acquire);
  return rows ? *rows : *find_rows("auto");
}

void select_rows(const char* name) {
  const RowKernels* rows = find_rows(name);
  if (!rows)
    throw std::invalid_argument(std::string("instruction set '") + name +
                                "' is unknown or not on this processor; its best is '" + find_rows("auto")->name + "'");
  chosen.store(rows, std::memory_order_release);
}

}  // namespace rapidmoe
