// Gossip (kernels/mix.h) as an operation on one row: the inputs, then the outputs.
#pragma once

#include <span>

#include "kernels/cuda/element_ops.h"
#include "kernels/mix.h"

namespace sordino::kernels::cuda {

// `numbers` holds for each average in turn: the number of inputs, the inputs, the number of outputs, the outputs.
template <class T, int kNumbers, int kAverages, int kPacks>
struct Mix {
  // Memory in which a thread keeps averages until it has read all inputs: slot k is at waiting[k * stride].
  struct State {
    Quad* waiting;
    std::uint32_t stride;
  };
  using Element = T;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = kPacks;

  std::uint32_t lists, inputs, averages;
  bool direct;  // no average reads what another one writes, so results need not wait
  double scales[kAverages];
  std::uint16_t numbers[kNumbers];

  // Slots that each thread needs.
  std::size_t slots() const { return direct ? 0 : std::size_t{averages} * kPacks; }

  // Returns false if the averages do not fit.
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
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State& state) const {
    const ThreadPacks place{i * sizeof(T), step * sizeof(T), live};
    const std::uint16_t* next = numbers;
    for (std::uint32_t k = 0; k < averages; ++k) {
      const std::uint32_t sources = *next++;
      Pack<T, kWidth> packs[kPacks];
      average(packs, row, place, next, sources, scales[k]);
      next += sources;
      const std::uint32_t targets = *next++;
      if (direct) {
        write(row, place, next, targets, packs);
      } else {
        SORDINO_UNROLL
        for (int u = 0; u < kPacks; ++u) store(slot(state, k, u), packs[u]);
      }
      next += targets;
    }
    if (direct) return;
    next = numbers;
    for (std::uint32_t k = 0; k < averages; ++k) {
      next += 1 + *next;
      const std::uint32_t targets = *next++;
      Pack<T, kWidth> packs[kPacks];
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) packs[u] = load<T, kWidth>(slot(state, k, u));
      write(row, place, next, targets, packs);
      next += targets;
    }
  }

 private:
  // Packs of a thread: offset of the first, distance from one to the next (both in bytes), and their number.
  struct ThreadPacks {
    std::size_t at, stride;
    int live;
  };

  SORDINO_BOTH static std::byte* slot(const State& state, std::uint32_t k, int u) {
    return reinterpret_cast<std::byte*>(state.waiting + (k * kPacks + u) * state.stride);
  }

  template <int kWidth>
  SORDINO_BOTH static void average(Pack<T, kWidth> (&packs)[kPacks], const Row& row, const ThreadPacks& place,
                                   const std::uint16_t* sources, std::uint32_t count, double scale) {
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) packs[u] = {};
    if (count == 0) return;
    load_live(packs, row.at(sources[0]) + place.at, place.stride, place.live);
    if (count == 1 && scale == 1) return;
    const auto factor = static_cast<Stage<T>>(scale);
    Stage<T> total[kPacks][kWidth];
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) total[u][e] = decode(packs[u].values[e]);
    }
    for (std::uint32_t k = 1; k < count; ++k) {
      load_live(packs, row.at(sources[k]) + place.at, place.stride, place.live);
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        SORDINO_UNROLL
        for (int e = 0; e < kWidth; ++e) total[u][e] = total[u][e] + decode(packs[u].values[e]);
      }
    }
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) packs[u].values[e] = encoded<T>(total[u][e] * factor);
    }
  }

  template <int kWidth>
  SORDINO_BOTH void write(const Row& row, const ThreadPacks& place, const std::uint16_t* targets, std::uint32_t count,
                          const Pack<T, kWidth> (&packs)[kPacks]) const {
    for (std::uint32_t k = 0; k < count; ++k) {
      std::byte* const to = row.at(inputs + targets[k]) + place.at;
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        if (u < place.live) store(to + u * place.stride, packs[u]);
      }
    }
  }
};

}  // namespace sordino::kernels::cuda
