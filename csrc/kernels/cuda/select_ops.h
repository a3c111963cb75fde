// kernels::select of rows (counters, indices, samples), one block a row: a histogram of the counters, from it the
// lowest counter that is still taken, and then, sixteen counters a thread at a time, the indices in rising order.
// Between these steps the block waits; what it adds up or scans is in select.cu, and in the test for the host.
#pragma once

#include "kernels/cuda/walk.h"

namespace sordino::kernels::cuda {

inline constexpr int kBins = 256;

// Neighbouring counters, of which [begin, end) belong to the row.
struct Sixteen {
  std::int64_t first;  // the index of values[0]
  int begin, end;
  Pack<std::uint8_t, kWidest> values;
};

// A row's tiles begin at a multiple of 16 bytes, before its first counter perhaps.
SORDINO_BOTH inline std::uint64_t sixteens_of(const Row& row, std::uint64_t count) {
  return (row.words[0] % kWidest + count + kWidest - 1) / kWidest;
}

SORDINO_BOTH inline Sixteen load_sixteen(const Row& row, std::uint64_t count, std::uint64_t number) {
  Sixteen found;
  found.first = static_cast<std::int64_t>(number * kWidest) - static_cast<std::int64_t>(row.words[0] % kWidest);
  const std::int64_t left = static_cast<std::int64_t>(count) - found.first;
  found.begin = found.first < 0 ? static_cast<int>(-found.first) : 0;
  found.end = left <= 0 ? found.begin : left < kWidest ? static_cast<int>(left) : kWidest;
  if (found.begin == 0 && found.end == kWidest) {
    found.values = load<std::uint8_t, kWidest>(row.at(0) + found.first);
  } else {
    SORDINO_UNROLL
    for (int e = 0; e < kWidest; ++e) {
      const bool ours = e >= found.begin && e < found.end;
      found.values.values[e] = ours ? load<std::uint8_t, 1>(row.at(0) + found.first + e).values[0] : 0;
    }
  }
  return found;
}

// Calls add(counter, times) for what this thread finds. Most counters are alike, and what a thread adds once for many
// it need not fight over with the others.
template <class Add>
SORDINO_BOTH inline void count_counters(const Row& row, std::uint64_t count, std::uint32_t thread,
                                        std::uint32_t threads, const Add& add) {
  std::uint8_t last = 0;
  std::uint32_t times = 0;
  for (std::uint64_t number = thread; number < sixteens_of(row, count); number += threads) {
    const Sixteen found = load_sixteen(row, count, number);
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
SORDINO_BOTH inline Cut cut_of(const std::uint32_t* bins, std::uint64_t samples) {
  std::uint32_t cut = kBins - 1;
  for (; bins[cut] < samples; --cut) samples -= bins[cut];
  return {cut, static_cast<std::uint32_t>(samples)};
}

// How many counters are above the cut and at it; elements before, as their sums.
struct Taken {
  std::uint32_t above, ties;
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
