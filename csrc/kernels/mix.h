// Kernel of gossip: some vectors of one dtype become averages of each other, all at once.
#pragma once

#include <span>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// New value of each output in `into`: scale * (sum of the inputs in `of`, in that order). Zero if `of` is empty.
struct Average {
  std::vector<int> of;
  std::vector<int> into;
  double scale;
};

// Whether an average would read a vector that another average has written.
bool clashes(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
             std::span<const Average> averages);

// For each element, reads all inputs before it writes any output. So outputs may be inputs, and an average may replace
// a vector that other averages read. inputs[k] and outputs[k] have `count` elements. Each output is named by at most
// one average; an output that none names does not change. One pass over memory: blocks are so small that values that
// are read twice, or wait to be written, stay in cache. Throws UsageError if values of a type that is not floating
// would be read after they are written.
void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
         std::span<const Average> averages, std::size_t count);

}  // namespace sordino::kernels
