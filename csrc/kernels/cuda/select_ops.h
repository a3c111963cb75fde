// kernels::select of rows (counters, indices, samples, skipped; see items_plan.h). Each block has a chunk of a row:
//
//   1. a histogram of each row's counters, which gives the cut: the lowest counter that is taken
//   2. the number of taken counters of each chunk
//   3. the indices in rising order, after those of earlier chunks. A thread takes sixteen counters at a time
//
// Each step is one kernel. Sums over a block are in select.cu, and for the host in tests/cpp/test_cuda_sums.cc.
#pragma once

#include "kernels/cuda/walk.h"

namespace sordino::kernels::cuda {

inline constexpr int kBins = 256;

// Bytes of a chunk. Each block adds up the counts of all earlier chunks of its row, so there must not be many.
inline constexpr std::uint32_t kSelectChunk = 64 << 10;

// Neighboring counters, of which [begin, end) belong to the row.
struct Sixteen {
  std::int64_t first;  // the index of values[0]
  int begin, end;
  Pack<std::uint8_t, kWidest> values;
};

// Loads sixteen counters. `at`: their position in the row, a multiple of 16. `end`: where the row's chunk ends.
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

// Calls add(counter, times) for this thread's counters. Most neighboring counters are equal: adding them at once
// reduces contention between threads.
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

// The lowest counter that is taken, and how many elements with this counter are taken.
struct Cut {
  std::uint32_t counter, ties;
};
// Whether a counter is the lowest that is taken, if `times` elements have it and `above` elements have a higher one.
SORDINO_BOTH inline bool is_lowest(std::uint64_t times, std::uint64_t above, std::uint64_t samples) {
  return above < samples && samples <= above + times;
}

// Numbers of counters above the cut and at the cut, of some elements.
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
