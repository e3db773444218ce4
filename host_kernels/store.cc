#include "store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>

namespace rapidmoe {
namespace {

std::mutex registry_mutex;
std::map<int64_t, std::shared_ptr<ResidualStore>>& registry() {
  static auto* stores = new std::map<int64_t, std::shared_ptr<ResidualStore>>();
  return *stores;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw std::runtime_error(path + ": " + why + "; split the checkpoint again");
}

void check_header(const std::string& path, const ResidualHeader& h, const ResidualShape& s, int64_t layer) {
  if (std::memcmp(h.magic, "RMOERES1", 8) != 0) refuse(path, "not a residual file (wrong magic)");
  if (h.version != kFormatVersion)
    throw std::runtime_error(path + ": residual format " + std::to_string(h.version) + ", this build reads " +
                             std::to_string(kFormatVersion) + "; update rapidmoe_jax");
  const struct {
    const char* name;
    int64_t got, wanted;
  } fields[] = {{"layer", h.layer, layer},
                {"experts", h.experts, s.experts},
                {"units", h.units, s.units},
                {"width", h.width, s.width},
                {"base_bits", h.base_bits, s.base_bits},
                {"residual_bits", h.residual_bits, s.residual_bits},
                {"group_size", h.group_size, kGroup},
                {"record_bytes", int64_t(h.record_bytes), RecordLayout(s.base_bits, s.residual_bits, s.width).bytes}};
  for (const auto& f : fields)
    if (f.got != f.wanted)
      refuse(path, std::string(f.name) + " is " + std::to_string(f.got) + ", wanted " + std::to_string(f.wanted));
}

}  // namespace

RecordFile::RecordFile(const std::string& path, const ResidualShape& shape, int64_t layer) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) refuse(path, std::string("cannot be opened (") + std::strerror(errno) + ")");
  struct stat info;
  const bool known = fstat(fd, &info) == 0;
  const int64_t wanted =
      kHeaderBytes + shape.experts * shape.units * RecordLayout(shape.base_bits, shape.residual_bits, shape.width).bytes;
  ResidualHeader header;
  const bool read = known && pread(fd, &header, sizeof header, 0) == ssize_t(sizeof header);
  void* data = MAP_FAILED;
  if (read && info.st_size == wanted) data = mmap(nullptr, wanted, PROT_READ, MAP_SHARED, fd, 0);
  const std::string reason = std::strerror(errno);
  close(fd);
  if (!read) refuse(path, "shorter than a header");
  check_header(path, header, shape, layer);
  if (info.st_size != wanted)
    refuse(path, "has " + std::to_string(info.st_size) + " bytes, wanted " + std::to_string(wanted));
  if (data == MAP_FAILED) refuse(path, "cannot be mapped (" + reason + ")");
  data_ = static_cast<const uint8_t*>(data);
  size_ = wanted;
}

RecordFile::~RecordFile() { munmap(const_cast<uint8_t*>(data_), size_); }

ResidualStore::ResidualStore(const std::vector<std::string>& paths, const ResidualShape& shape) : shape_(shape) {
  if (shape.width % kGroup != 0 || shape.width < kGroup)
    throw std::invalid_argument("width " + std::to_string(shape.width) + " is not a multiple of " +
                                std::to_string(kGroup));
  for (size_t i = 0; i < paths.size(); ++i)
    files_.push_back(std::make_unique<RecordFile>(paths[i], shape, int64_t(i)));
}

RecordLayer ResidualStore::layer(int64_t layer) const {
  if (layer < 0 || layer >= layers())
    throw std::out_of_range("residual layer " + std::to_string(layer) + " is outside [0, " +
                            std::to_string(layers()) + ")");
  return {files_[layer]->records(), shape_.experts,   shape_.units,
          shape_.width,             shape_.base_bits, shape_.residual_bits};
}

int64_t store_open(std::shared_ptr<ResidualStore> store) {
  static int64_t next = 1;
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry()[next] = std::move(store);
  return next++;
}

void store_close(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  registry().erase(handle);
}

std::shared_ptr<ResidualStore> store_find(int64_t handle) {
  std::lock_guard<std::mutex> lock(registry_mutex);
  const auto found = registry().find(handle);
  if (found == registry().end())
    throw std::runtime_error("residual store " + std::to_string(handle) + " is closed; load the model again");
  return found->second;
}

}  // namespace rapidmoe
