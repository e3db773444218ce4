// A grow-only buffer on a cache line; what it held is lost when it grows.
#pragma once
#include <cstdint>
#include <memory>
#include <new>

namespace rapidmoe {

class Buffer {
 public:
  float* at_least(int64_t floats) {
    if (floats > size_) {
      data_.reset();
      data_.reset(static_cast<float*>(operator new[](floats * sizeof(float), std::align_val_t(64))));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(float* p) const { operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<float[], Free> data_;
  int64_t size_ = 0;
};

}  // namespace rapidmoe
