// Packs: a few adjacent elements that one access of up to 16 bytes loads or stores.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(SORDINO_LEVEL)
#define SORDINO_LEVEL cuda
#endif
#include "kernels/rounding.h"

// Compilers keep arrays in registers only if loops over them are unrolled.
#if defined(__CUDA_ARCH__)
#define SORDINO_UNROLL _Pragma("unroll")
#define SORDINO_NO_UNROLL _Pragma("unroll 1")
#else
#define SORDINO_UNROLL
#define SORDINO_NO_UNROLL
#endif

namespace sordino::kernels::cuda {

inline constexpr int kWidest = 16;  // bytes of the widest access

struct alignas(kWidest) Quad {
  std::uint32_t a, b, c, d;
};

template <class T, int kWidth>
struct Pack {
  T values[kWidth];
};

template <std::size_t kBytes>
struct AccessOf : WordOf<kBytes> {};
template <>
struct AccessOf<kWidest> {
  using type = Quad;
};
template <class T, int kWidth>
using Access = typename AccessOf<sizeof(Pack<T, kWidth>)>::type;

// The address must be a multiple of the size of Word. Other addresses crash, on GPUs and on the host (in tests).
template <class Word>
SORDINO_BOTH inline Word load_word(const std::byte* from) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const Word*>(from);
#else
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(Word) != 0) __builtin_trap();
  Word word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
#endif
}
template <class Word>
SORDINO_BOTH inline void store_word(std::byte* to, Word word) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<Word*>(to) = word;
#else
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(Word) != 0) __builtin_trap();
  __builtin_memcpy(to, &word, sizeof word);
#endif
}

template <class T, int kWidth>
SORDINO_BOTH inline Pack<T, kWidth> load(const std::byte* from) {
  return __builtin_bit_cast(Pack<T, kWidth>, load_word<Access<T, kWidth>>(from));
}
template <class T, int kWidth>
SORDINO_BOTH inline void store(std::byte* to, const Pack<T, kWidth>& pack) {
  store_word(to, __builtin_bit_cast(Access<T, kWidth>, pack));
}

// load() and store() element by element, for packs of which only the elements are aligned.
template <class T, int kWidth>
SORDINO_BOTH inline Pack<T, kWidth> load_each(const std::byte* from) {
  Pack<T, kWidth> pack;
  SORDINO_UNROLL
  for (int e = 0; e < kWidth; ++e) pack.values[e] = load<T, 1>(from + e * sizeof(T)).values[0];
  return pack;
}
template <class T, int kWidth>
SORDINO_BOTH inline void store_each(std::byte* to, const Pack<T, kWidth>& pack) {
  SORDINO_UNROLL
  for (int e = 0; e < kWidth; ++e) store<T, 1>(to + e * sizeof(T), {{pack.values[e]}});
}

// load() and store() of one element at any address.
template <class T>
SORDINO_BOTH inline T load_packed(const std::byte* from) {
  if (reinterpret_cast<std::uintptr_t>(from) % sizeof(T) == 0) return load<T, 1>(from).values[0];
  return __builtin_bit_cast(T, load_each<std::uint8_t, sizeof(T)>(from));
}
template <class T>
SORDINO_BOTH inline void store_packed(std::byte* to, T value) {
  if (reinterpret_cast<std::uintptr_t>(to) % sizeof(T) == 0) return store<T, 1>(to, {{value}});
  using Bytes = Pack<std::uint8_t, sizeof(T)>;
  store_each(to, __builtin_bit_cast(Bytes, value));
}

// Loads the first `live` of several packs, `step` bytes apart, and sets the others to zero.
template <class T, int kWidth, int kAhead>
SORDINO_BOTH inline void load_live(Pack<T, kWidth> (&packs)[kAhead], const std::byte* from, std::size_t step,
                                   int live) {
  SORDINO_UNROLL
  for (int u = 0; u < kAhead; ++u) packs[u] = u < live ? load<T, kWidth>(from + u * step) : Pack<T, kWidth>{};
}

template <class T>
SORDINO_BOTH inline T encoded(Stage<T> value) {
  if constexpr (std::is_class_v<T>) {
    T out;
    encode(value, out);
    return out;
  } else {
    return value;
  }
}

}  // namespace sordino::kernels::cuda
