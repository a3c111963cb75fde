// Loops over arrays in lanes. 16-bit floats use the level's widest vectors, because compilers do not vectorize their
// conversions well. All other types use single elements, which compilers do vectorize. Included by impl.h only.
#pragma once

#include "kernels/cpu/element.h"

#if defined(SORDINO_X86)
#include <immintrin.h>
#endif

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

struct Single {
  // 16-bit floats are loaded and stored as integers: GCC 12 vectorizes no loop that copies a struct.
  template <class T>
  static Stage<T> load(const Loose<T>* p) {
    if constexpr (std::is_class_v<T>) return decode(T{p->value.bits});
    if constexpr (!std::is_class_v<T>) return p->value;
  }
  // Out is T, or Stage<T> for a partial result.
  template <class Out>
  static void store(Loose<Out>* p, Stage<Out> value) {
    if constexpr (std::is_class_v<Out>) {
      Out out;
      encode(value, out);
      p->value.bits = out.bits;
    } else {
      p->value = value;
    }
  }
};

template <class Vector>
inline Vector load_as(const void* p) {
  Vector vector;
  __builtin_memcpy(&vector, p, sizeof vector);
  return vector;
}

// Vectors of floats, and of the integers between 16-bit elements and floats. __builtin_convertvector could replace
// widen() and narrow(), but GCC 12 splits it into narrow steps.
#if defined(__AVX512F__)
using Floats = __m512;
using Bits16 = __m256i;
using Bits32 = std::uint32_t __attribute__((vector_size(64)));
// Zero-masking forms, because GCC 12 warns of uninitialized variables inside the unmasked ones.
inline Floats from_half(Bits16 bits) { return _mm512_maskz_cvtph_ps(0xffff, bits); }
inline Bits16 to_half(Floats value) { return _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT); }
inline Bits32 widen(Bits16 bits) { return reinterpret_cast<Bits32>(_mm512_maskz_cvtepu16_epi32(0xffff, bits)); }
inline Bits16 narrow(Bits32 bits) { return _mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(bits)); }
#elif defined(__F16C__)
using Floats = __m256;
using Bits16 = __m128i;
using Bits32 = std::uint32_t __attribute__((vector_size(32)));
inline Floats from_half(Bits16 bits) { return _mm256_cvtph_ps(bits); }
inline Bits16 to_half(Floats value) { return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT); }
inline Bits32 widen(Bits16 bits) { return reinterpret_cast<Bits32>(_mm256_cvtepu16_epi32(bits)); }
inline Bits16 narrow(Bits32 bits) {
  const __m256i all = reinterpret_cast<__m256i>(bits);
  return _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
#endif

// Conversions keep a core too busy to load far ahead, and the hardware's prefetchers do not suffice: without this
// prefetch, large bfloat16 arrays take up to 3 times as long. A prefetch past the end of an array is harmless, but a
// pointer there is not valid: so the address is an integer.
constexpr std::size_t kLine = 64;  // bytes that one prefetch loads
inline void prefetch(const void* p) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(p) + 1024));
}

#if defined(__F16C__)
struct Wide {
  static constexpr std::size_t kWidth = sizeof(Floats) / sizeof(float);

  static Floats load(const Loose<float>* p) { return load_as<Floats>(p); }
  static Floats load(const Loose<Half>* p) {
    prefetch(p);
    return from_half(load_as<Bits16>(p));
  }
  static Floats load(const Loose<BFloat16>* p) {
    prefetch(p);
    return reinterpret_cast<Floats>(widen(load_as<Bits16>(p)) << 16);
  }

  static void store(Loose<float>* p, Floats value) { __builtin_memcpy(p, &value, sizeof value); }
  static void store(Loose<Half>* p, Floats value) {
    const Bits16 bits = to_half(value);
    __builtin_memcpy(p, &bits, sizeof bits);
  }
  // encode(float, BFloat16&) for vectors.
  static void store(Loose<BFloat16>* p, Floats value) {
    const Bits32 bits = reinterpret_cast<Bits32>(value);
    const Bits32 rounded = bits + (((bits >> 16) & 1u) + 0x7fffu);
    const Bits32 result = value != value ? bits | 0x00400000u : rounded;
    const Bits16 high = narrow(result >> 16);
    __builtin_memcpy(p, &high, sizeof high);
  }
};
#endif

// Calls body(lane, i) so that each index below `count` is covered once. body loads and stores at index i through lane.
template <class T, class Body>
inline void for_lanes(std::size_t count, Body body) {
  std::size_t i = 0;
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
    for (; i + Wide::kWidth <= count; i += Wide::kWidth) body(Wide{}, i);
  }
#endif
  SORDINO_INDEPENDENT
  for (std::size_t k = i; k < count; ++k) body(Single{}, k);
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
