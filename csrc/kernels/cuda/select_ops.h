// kernels::select of rows (counters, indices, samples, counters before the row's), of which a block has a chunk: first
// a histogram of each row's counters, from it the lowest counter that is still taken; then how many each chunk takes;
// and then, sixteen counters a thread at a time, the indices in rising order, behind what the chunks before have taken.
// Between these steps the block waits; what it adds up or scans is in select.cu, and in the test for the host.
#pragma once

#include "kernels/cuda/walk.h"

namespace sordino::kernels::cuda {

inline constexpr int kBins = 256;

// Bytes a chunk. Whoever has one adds up what all before it take, so that there must not be many.
inline constexpr std::uint32_t kSelectChunk = 64 << 10;

// Neighbouring counters, of which [begin, end) belong to the row.
struct Sixteen {
  std::int64_t first;  // the index of values[0]
  int begin, end;
  Pack<std::uint8_t, kWidest> values;
};

// A row begins at a multiple of 16 bytes, with counters that are not its own perhaps, and so does a chunk: `at` is
// where in the row, `end` where the row ends.
SORDINO_BOTH inline Sixteen load_sixteen(const Row& row, std::uint64_t at, std::uint64_t end) {
  Sixteen found;
  const std::uint64_t skipped = row.words[3];
  found.first = static_cast<std::int64_t>(at) - static_cast<std::int64_t>(skipped);
  found.begin = at < skipped ? static_cast<int>(skipped - at) : 0;
  found.end = at >= end ? found.begin : end - at < kWidest ? static_cast<int>(end - at) : kWidest;
  if (found.begin == 0 && found.end == kWidest) {
    found.values = load<std::uint8_t, kWidest>(row.at(0) + at);
  } else {
    SORDINO_UNROLL
    for (int e = 0; e < kWidest; ++e) {
      const bool ours = e >= found.begin && e < found.end;
      found.values.values[e] = ours ? load<std::uint8_t, 1>(row.at(0) + at + e).values[0] : 0;
    }
  }
  return found;
}

// Calls add(counter, times) for what this thread finds. Most counters are alike, and what a thread adds once for many
// it need not fight over with the others.
template <class Add>
SORDINO_BOTH inline void count_counters(const Row& row, std::uint64_t begin, std::uint64_t end, std::uint32_t thread,
                                        std::uint32_t threads, const Add& add) {
  std::uint8_t last = 0;
  std::uint32_t times = 0;
  for (std::uint64_t at = begin + thread * kWidest; at < end; at += threads * kWidest) {
    const Sixteen found = load_sixteen(row, at, end);
    SORDINO_UNROLL
    for (int e = 0; e < kWidest; ++e) {
      if (e < found.begin || e >= found.end) continue;
      if (found.values.values[e] != last) {
        if (times != 0) add(last, times);
        last = found.values.values[e];
        times = 0;
      }
      ++times;
    }
  }
  if (times != 0) add(last, times);
}

// The lowest counter taken, and how many elements that have it.
struct Cut {
  std::uint32_t counter, ties;
};
// Whether `counter`, which `times` elements have and `above` others exceed, is the lowest of so many samples.
SORDINO_BOTH inline bool is_lowest(std::uint64_t times, std::uint64_t above, std::uint64_t samples) {
  return above < samples && samples <= above + times;
}

// How many counters are above the cut and at it; elements before, as their sums.
struct Taken {
  std::uint32_t above, ties;
  SORDINO_BOTH void add(const Taken& other) {
    above += other.above;
    ties += other.ties;
  }
};
SORDINO_BOTH inline Taken taken_of(const Sixteen& found, const Cut& cut) {
  Taken taken{0, 0};
  SORDINO_UNROLL
  for (int e = 0; e < kWidest; ++e) {
    const bool ours = e >= found.begin && e < found.end;
    taken.above += ours && found.values.values[e] > cut.counter;
    taken.ties += ours && found.values.values[e] == cut.counter;
  }
  return taken;
}

SORDINO_BOTH inline void write_taken(const Row& row, const Sixteen& found, const Cut& cut, Taken before) {
  SORDINO_UNROLL
  for (int e = 0; e < kWidest; ++e) {
    if (e < found.begin || e >= found.end || found.values.values[e] < cut.counter) continue;
    const bool tie = found.values.values[e] == cut.counter;
    if (!tie || before.ties < cut.ties) {
      const std::uint64_t at = before.above + (before.ties < cut.ties ? before.ties : cut.ties);
      store<std::uint32_t, 1>(row.at(1) + at * sizeof(std::uint32_t), {{static_cast<std::uint32_t>(found.first + e)}});
    }
    before.above += !tie;
    before.ties += tie;
  }
}

}  // namespace sordino::kernels::cuda
