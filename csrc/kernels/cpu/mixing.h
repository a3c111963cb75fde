// Several averages of the same inputs, in one pass over memory. A tile of every input is read into the first-level
// cache before any output of the tile is written. Included by impl.h only.
#pragma once

#include "kernels/cpu/lanes.h"
#include "kernels/cpu/table.h"

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

// Computes one average of a tile. `rows`: a row of kMixTile elements for each input, and one for partial sums.
template <class T>
void average(const Mixture& m, const Share& share, Loose<Stage<T>>* rows, std::size_t begin, std::size_t count) {
  const std::size_t offset = begin * sizeof(T);
  const auto row = [=](int input) { return rows + static_cast<std::size_t>(input) * kMixTile; };
  std::byte* into = m.outputs[share.into[0]] + offset;
  if (share.of_count == 0) {
    __builtin_memset(into, 0, count * sizeof(T));
  } else {
    const std::size_t last = share.of_count - 1;
    Loose<T>* out = loose<T>(into);
    const Loose<Stage<T>>* sum = row(share.of[0]);
    const auto scale = static_cast<Stage<T>>(share.scale);
    for (std::size_t k = 1; k + 1 < last; ++k) {
      Loose<Stage<T>>* partial = row(static_cast<int>(m.input_count));
      const Loose<Stage<T>>* next = row(share.of[k]);
      for_lanes<T>(
          count, [=](auto lane, std::size_t i) { lane.store(partial + i, lane.load(sum + i) + lane.load(next + i)); });
      sum = partial;
    }
    const Loose<Stage<T>>* next = row(share.of[last > 1 ? last - 1 : last]);
    const Loose<Stage<T>>* end = row(share.of[last]);
    if (last == 0) {
      for_lanes<T>(count, [=](auto lane, std::size_t i) { lane.store(out + i, lane.load(sum + i) * scale); });
    } else if (last == 1) {
      for_lanes<T>(count, [=](auto lane, std::size_t i) {
        lane.store(out + i, (lane.load(sum + i) + lane.load(end + i)) * scale);
      });
    } else {
      for_lanes<T>(count, [=](auto lane, std::size_t i) {
        lane.store(out + i, ((lane.load(sum + i) + lane.load(next + i)) + lane.load(end + i)) * scale);
      });
    }
  }
  for (std::size_t k = 1; k < share.into_count; ++k)
    __builtin_memcpy(m.outputs[share.into[k]] + offset, into, count * sizeof(T));
}

template <class T>
void mix(const Mixture& m) {
  auto* rows = reinterpret_cast<Loose<Stage<T>>*>(m.scratch);
  for (std::size_t begin = 0; begin < m.count; begin += kMixTile) {
    const std::size_t count = m.count - begin < kMixTile ? m.count - begin : kMixTile;
    for (std::size_t input = 0; input < m.input_count; ++input) {
      const Loose<T>* from = loose<T>(m.inputs[input] + begin * sizeof(T));
      Loose<Stage<T>>* row = rows + input * kMixTile;
      for_lanes<T>(count, [=](auto lane, std::size_t i) { lane.store(row + i, lane.load(from + i)); });
    }
    for (std::size_t k = 0; k < m.share_count; ++k) average<T>(m, m.shares[k], rows, begin, count);
  }
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
