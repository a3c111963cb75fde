// Kernel of gossip: some vectors of one dtype become averages of each other, all at once.
#pragma once

#include <span>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// New value of the outputs `into`: scale * (the sum of the inputs `of`, in that order; zero if `of` is empty).
struct Average {
  std::vector<int> of;
  std::vector<int> into;
  double scale;
};

// Whether an average would read a vector that another average has written.
bool clashes(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
             std::span<const Average> averages);

// Element by element, reads all inputs before it writes any output. So outputs may be inputs, and a vector that two
// averages read may be replaced by a third. inputs[k] and outputs[k] have `count` elements; outputs that no average
// names stay as they are. Each output is named by one average at most. One pass over memory: blocks are so small that
// values that are read twice, or wait to be written, stay in cache. Throws UsageError if values of a type that is not
// floating would be read after they are written.
void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
         std::span<const Average> averages, std::size_t count);

}  // namespace sordino::kernels
