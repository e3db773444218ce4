#include "dense.h"

namespace rapidmoe {

bool is_dense(const Groups& groups) { return groups.pairs.size() >= 4 * groups.experts.size(); }

void dense_items(const Groups& groups, int64_t width, std::vector<DenseItem>* items) {
  items->clear();
  for (size_t a = 0; a < groups.experts.size(); ++a) {
    if (groups.begin[a + 1] - groups.begin[a] < kMany) {
      items->push_back({int64_t(a), -1});
    } else {
      for (int64_t g = 0; g < width / kGroup; g += kStrip) items->push_back({int64_t(a), g});
    }
  }
}

}  // namespace rapidmoe
