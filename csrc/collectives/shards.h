// Shards of a vector that all ranks of a node can reach: each rank works on one.
#pragma once

#include <algorithm>

#include "base/dtype.h"

namespace sordino {

// Element bounds of each rank's shard of `count` elements, on cache-line boundaries.
struct Shards {
  std::size_t count, parts, grain;
  std::size_t begin(std::size_t index) const {
    const std::size_t grains = (count + grain - 1) / grain;
    return std::min(count, grains * index / parts * grain);
  }
  std::size_t end(std::size_t index) const { return begin(index + 1); }
};

inline Shards shards_of(int parts, DType dtype, std::size_t count) {
  return {count, static_cast<std::size_t>(parts), 64 / size_of(dtype)};
}

}  // namespace sordino
