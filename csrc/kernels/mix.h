// The kernel of gossip: some vectors of one dtype become averages of each other, all at once.
#pragma once

#include <span>
#include <vector>

#include "base/dtype.h"

namespace sordino::kernels {

// What the outputs `into` become: scale * (the sum of the inputs `of`, in that order; zero if there are none).
struct Average {
  std::vector<int> of;
  std::vector<int> into;
  double scale;
};

// Whether an average would read what another one has written.
bool clashes(std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
             std::span<const Average> averages);

// Element by element, reads all inputs before it writes any output, so outputs may be inputs, and a vector that two
// averages read may be replaced by a third. inputs[k] and outputs[k] have `count` elements; outputs that no average
// names stay as they are. Every vector is named by one average at most. One pass over memory: blocks are small enough
// that what is read twice, or waits to be written, stays in cache. UsageError where other types than floating ones
// would be read after they are written.
void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
         std::span<const Average> averages, std::size_t count);

}  // namespace sordino::kernels
