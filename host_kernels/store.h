// Residual files of one checkpoint, mapped read-only, and the registry that turns a handle into them.
// A file is checked against its header and its size once, here; the kernels trust it afterwards.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout.h"
#include "residual.h"

namespace rapidmoe {

struct ResidualShape {
  int64_t experts, units, width;
  int base_bits, residual_bits;
};

// One mapped file of records, header page first.
class RecordFile {
 public:
  // Throws std::runtime_error: file, got, wanted, remedy.
  RecordFile(const std::string& path, const ResidualShape& shape, int64_t layer);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;
  const uint8_t* records() const { return data_ + kHeaderBytes; }

 private:
  const uint8_t* data_ = nullptr;
  int64_t size_ = 0;
};

class ResidualStore {
 public:
  // Files of the mixture-of-experts layers in order.
  ResidualStore(const std::vector<std::string>& paths, const ResidualShape& shape);
  int64_t layers() const { return int64_t(files_.size()); }
  // Throws std::out_of_range if layer is not in [0, layers()).
  RecordLayer layer(int64_t layer) const;

 private:
  ResidualShape shape_;
  std::vector<std::unique_ptr<RecordFile>> files_;
};

// Handles are never reused; a closed one is refused. A job keeps its store alive.
int64_t store_open(std::shared_ptr<ResidualStore> store);
void store_close(int64_t handle);
std::shared_ptr<ResidualStore> store_find(int64_t handle);

}  // namespace rapidmoe
