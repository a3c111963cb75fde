// Operations that compute an element from the elements at the same index: reductions, a * x + b * y, LARS, copies.
#pragma once

#include "kernels/cuda/walk.h"

namespace sordino::kernels::cuda {

struct Nothing {};

// Number of packs loaded at once: enough to hide the latency of memory, and few enough to leave registers for other
// blocks. For operations that unpack all packs: an unpacked narrow element takes 4 to 8 times its size.
template <class T, int kWidth>
inline constexpr int kInFlight = kWidth == 1 || sizeof(T) >= sizeof(float) ? 4 : static_cast<int>(sizeof(T));

// values[e] = fold(values[e], more[e])
template <class Stage, int kCount>
SORDINO_BOTH inline void fold(ReduceOp op, Stage (&values)[kCount], const Stage (&more)[kCount]) {
  switch (op) {
    case ReduceOp::kSum:
      SORDINO_UNROLL
      for (int e = 0; e < kCount; ++e) values[e] = Sum::apply(values[e], more[e]);
      break;
    case ReduceOp::kProduct:
      SORDINO_UNROLL
      for (int e = 0; e < kCount; ++e) values[e] = Product::apply(values[e], more[e]);
      break;
    case ReduceOp::kMin:
      SORDINO_UNROLL
      for (int e = 0; e < kCount; ++e) values[e] = Min::apply(values[e], more[e]);
      break;
    default:
      SORDINO_UNROLL
      for (int e = 0; e < kCount; ++e) values[e] = Max::apply(values[e], more[e]);
  }
}

// A row has `sources` sources, then destinations. Floats are always scaled, because multiplying by 1 is exact.
template <class T>
struct Reduce {
  using Element = T;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = kInFlight<T, kWidth>;

  std::uint32_t lists, sources;
  ReduceOp op;
  Stage<T> pre, post;  // not used for integers

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State&) const {
    constexpr int kPacks = kAhead<kWidth>;
    const std::size_t at = i * sizeof(T), stride = step * sizeof(T);
    Pack<T, kWidth> next[kPacks];
    Stage<T> total[kPacks][kWidth] = {};
    load_live(next, row.at(0) + at, stride, live);
    for (std::uint32_t k = 0; k < sources; ++k) {
      Stage<T> values[kPacks][kWidth];
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        SORDINO_UNROLL
        for (int e = 0; e < kWidth; ++e) values[u][e] = scaled(decode(next[u].values[e]), pre);
      }
      if (k + 1 < sources) load_live(next, row.at(k + 1) + at, stride, live);
      SORDINO_UNROLL
      for (int u = 0; u < kPacks; ++u) {
        if (k != 0) {
          fold(op, total[u], values[u]);
        } else {
          SORDINO_UNROLL
          for (int e = 0; e < kWidth; ++e) total[u][e] = values[u][e];
        }
      }
    }
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u >= live) break;
      Pack<T, kWidth> out;
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) out.values[e] = encoded<T>(scaled(total[u][e], post));
      for (std::uint32_t k = sources; k < lists; ++k) store(row.at(k) + at + u * stride, out);
    }
  }

 private:
  SORDINO_BOTH static Stage<T> scaled(Stage<T> value, Stage<T> factor) {
    if constexpr (std::is_integral_v<T>) return value;
    if constexpr (!std::is_integral_v<T>) return value * factor;
  }
};

// Scaled integers, computed in double, element by element. Slow, but training does not use them.
template <class T>
struct ReduceScaled {
  using Element = T;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kSingle;
  template <int kWidth>
  static constexpr int kAhead = 1;

  std::uint32_t lists, sources;
  ReduceOp op;
  double pre, post;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t, int, State&) const {
    T total[1] = {scaled(load<T, 1>(row.at(0) + i * sizeof(T)).values[0], pre)};
    for (std::uint32_t k = 1; k < sources; ++k) {
      const T next[1] = {scaled(load<T, 1>(row.at(k) + i * sizeof(T)).values[0], pre)};
      fold(op, total, next);
    }
    const T out = scaled(total[0], post);
    for (std::uint32_t k = sources; k < lists; ++k) store<T, 1>(row.at(k) + i * sizeof(T), {{out}});
  }

 private:
  SORDINO_BOTH static T scaled(T value, double factor) {
    return factor == 1 ? value : saturate<T>(static_cast<double>(value) * factor);
  }
};

// y = a * x + b * y of a row (x, y).
template <class T>
struct Axpby {
  using Element = T;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = 4;

  std::uint32_t lists;
  Stage<T> a, b;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State&) const {
    constexpr int kPacks = kAhead<kWidth>;
    const std::size_t at = i * sizeof(T), stride = step * sizeof(T);
    Pack<T, kWidth> x[kPacks], y[kPacks];
    load_live(x, row.at(0) + at, stride, live);
    load_live(y, row.at(1) + at, stride, live);
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u >= live) break;
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        y[u].values[e] = encoded<T>(decode(x[u].values[e]) * a + decode(y[u].values[e]) * b);
      }
      store(row.at(1) + at + u * stride, y[u]);
    }
  }
};

// Kernels::lars_step of a row (weights, gradient) or (weights, gradient, velocity).
template <class T>
struct Lars {
  using Element = T;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kWide;
  template <int kWidth>
  static constexpr int kAhead = 2;

  std::uint32_t lists;
  const double* rates;
  Stage<T> decay, momentum;
  bool nesterov;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State&) const {
    constexpr int kPacks = kAhead<kWidth>;
    const std::size_t at = i * sizeof(T), stride = step * sizeof(T);
    const bool moving = lists == 3;
    const auto rate = static_cast<Stage<T>>(rates[row.index]);
    Pack<T, kWidth> weights[kPacks], gradient[kPacks], velocity[kPacks] = {};
    load_live(weights, row.at(0) + at, stride, live);
    load_live(gradient, row.at(1) + at, stride, live);
    if (moving) load_live(velocity, row.at(2) + at, stride, live);
    SORDINO_UNROLL
    for (int u = 0; u < kPacks; ++u) {
      if (u >= live) break;
      SORDINO_UNROLL
      for (int e = 0; e < kWidth; ++e) {
        const Stage<T> w = decode(weights[u].values[e]);
        const Stage<T> d = rate * (decode(gradient[u].values[e]) + decay * w);
        const Stage<T> v = moving ? momentum * decode(velocity[u].values[e]) + d : d;
        velocity[u].values[e] = encoded<T>(v);
        weights[u].values[e] = encoded<T>(w - (nesterov ? d + momentum * v : v));
      }
      if (moving) store(row.at(2) + at + u * stride, velocity[u]);
      store(row.at(0) + at + u * stride, weights[u]);
    }
  }
};

// Copies bytes from the first address of a row to all others. Packs are aligned at the first destination. At less
// aligned addresses, an access is split into narrower ones. So a tensor of odd size does not slow down later tensors.
struct Copy {
  using Element = std::uint8_t;
  using State = Nothing;
  static constexpr Accesses kAccesses = Accesses::kStored;
  template <int kWidth>
  static constexpr int kAhead = 4;

  std::uint32_t lists;

  template <int kWidth>
  SORDINO_BOTH void apply(const Row& row, std::size_t i, std::size_t step, int live, State&) const {
    using Whole = Access<std::uint8_t, kWidth>;
    const std::byte* const from = row.at(0) + i;
    in_words<kWidth>(from, [&](auto word) {
      using Word = decltype(word);
      // If accesses are narrow, those of one pack are enough in flight.
      constexpr int kPacks = sizeof(Word) * 4 < kWidth ? 1 : 4;
      SORDINO_NO_UNROLL
      for (int first = 0; first < live; first += kPacks) {
        Whole packs[kPacks];
        SORDINO_UNROLL
        for (int u = 0; u < kPacks; ++u) {
          packs[u] = first + u < live ? load_in<Word, Whole>(from + (first + u) * step) : Whole{};
        }
        for (std::uint32_t k = 1; k < lists; ++k) {
          std::byte* const to = row.at(k) + i + first * step;
          in_words<kWidth>(to, [&](auto other) {
            SORDINO_UNROLL
            for (int u = 0; u < kPacks; ++u) {
              if (first + u < live) store_in<decltype(other)>(to + u * step, packs[u]);
            }
          });
        }
      }
    });
  }

 private:
  // Calls visitor(Word{}) with the widest word that can access a pack at the address.
  template <int kWidth, class Visitor>
  SORDINO_BOTH static void in_words(const std::byte* at, const Visitor& visitor) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    if constexpr (kWidth == 1) {
      visitor(std::uint8_t{});
    } else if (address % 16 == 0) {
      visitor(Quad{});
    } else if (address % 8 == 0) {
      visitor(std::uint64_t{});
    } else if (address % 4 == 0) {
      visitor(std::uint32_t{});
    } else if (address % 2 == 0) {
      visitor(std::uint16_t{});
    } else {
      visitor(std::uint8_t{});
    }
  }
  template <class Word, class Whole>
  SORDINO_BOTH static Whole load_in(const std::byte* from) {
    return __builtin_bit_cast(Whole, load_each<Word, sizeof(Whole) / sizeof(Word)>(from));
  }
  template <class Word, class Whole>
  SORDINO_BOTH static void store_in(std::byte* to, const Whole& whole) {
    using Words = Pack<Word, sizeof(Whole) / sizeof(Word)>;
    store_each(to, __builtin_bit_cast(Words, whole));
  }
};

}  // namespace sordino::kernels::cuda
