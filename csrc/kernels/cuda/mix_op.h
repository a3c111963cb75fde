// Gossip (kernels/mix.h) as an operation on one row: the inputs, then the outputs.
#pragma once

#include <span>

#include "kernels/cuda/element_ops.h"
#include "kernels/mix.h"

namespace sordino::kernels::cuda {

// `numbers` is, average after average: how many inputs, which ones, how many outputs, which ones.
template <class T, int kNumbers, int kAverages>
struct Mix {
  // Where a thread keeps the averages of its elements until it has read all inputs: slot k at waiting[k * stride].
  struct State {
    Quad* waiting;
    std::uint32_t stride;
  };
  using Element = T;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = 1;

  std::uint32_t lists, inputs, averages;
  bool direct;  // no average reads what another one writes: nothing needs to wait
  double scales[kAverages];
  std::uint16_t numbers[kNumbers];

  // False if it does not fit.
  bool describe(std::span<const Average> all) {
    if (all.size() > kAverages) return false;
    averages = 0;
    std::size_t used = 0;
    for (const Average& average : all) {
      if (used + 2 + average.of.size() + average.into.size() > kNumbers) return false;
      scales[averages++] = average.scale;
      for (const auto* list : {&average.of, &average.into}) {
        numbers[used++] = static_cast<std::uint16_t>(list->size());
        for (const int vector : *list) numbers[used++] = static_cast<std::uint16_t>(vector);
      }
    }
    return true;
  }

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t, int, State& state) const {
    const std::size_t at = i * sizeof(T);
    const std::uint16_t* next = numbers;
    for (std::uint32_t k = 0; k < averages; ++k) {
      const std::uint32_t sources = *next++;
      const Pack<T, kWidth> average = average_of<kWidth>(row, at, next, sources, scales[k]);
      next += sources;
      const std::uint32_t targets = *next++;
      if (direct) {
        write(row, at, next, targets, average);
      } else {
        store(slot(state, k), average);
      }
      next += targets;
    }
    if (direct) return;
    next = numbers;
    for (std::uint32_t k = 0; k < averages; ++k) {
      next += 1 + *next;
      const std::uint32_t targets = *next++;
      write(row, at, next, targets, load<T, kWidth>(slot(state, k)));
      next += targets;
    }
  }

 private:
  SORDINO_BOTH static std::byte* slot(const State& state, std::uint32_t k) {
    return reinterpret_cast<std::byte*>(state.waiting + k * state.stride);
  }

  template <int kWidth>
  SORDINO_BOTH static Pack<T, kWidth> average_of(const Row& row, std::size_t at, const std::uint16_t* sources,
                                                 std::uint32_t count, double scale) {
    if (count == 0) return {};
    Pack<T, kWidth> next = load<T, kWidth>(row.at(sources[0]) + at);
    if (count == 1 && scale == 1) return next;
    const auto factor = static_cast<Stage<T>>(scale);
    Stage<T> total[kWidth] = {};
    for (std::uint32_t k = 0; k < count; ++k) {
      const Pack<T, kWidth> pack = next;
      if (k + 1 < count) next = load<T, kWidth>(row.at(sources[k + 1]) + at);
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const Stage<T> value = decode(pack.values[e]);
        total[e] = k == 0 ? value : total[e] + value;
      }
    }
    SORDINO_UNROLL
    for (int e = 0; e < kWidth; ++e) next.values[e] = encoded<T>(total[e] * factor);
    return next;
  }

  template <int kWidth>
  SORDINO_BOTH void write(const Row& row, std::size_t at, const std::uint16_t* targets, std::uint32_t count,
                          const Pack<T, kWidth>& average) const {
    for (std::uint32_t k = 0; k < count; ++k) store(row.at(inputs + targets[k]) + at, average);
  }
};

}  // namespace sordino::kernels::cuda
