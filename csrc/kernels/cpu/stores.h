// Copies to memory that other processors read. Files of several instruction set levels include this, so it has internal
// linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/prefetch.h"

namespace sordino::kernels {
namespace {

constexpr std::size_t kLine = 64;  // bytes of a cache line

// As memcpy, for lines that another processor has read. A processor has too few store buffers to wait for many lines at
// a time, but it can prefetch them.
inline void copy_to_read_lines(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kAhead = 8 * kLine;
  for (std::size_t at = 0; at < kAhead && at < bytes; at += kLine) prefetch_to_write(to + at);
  std::size_t at = 0;
  for (; at + kAhead < bytes; at += kLine) {
    prefetch_to_write(to + at + kAhead);
    __builtin_memcpy(to + at, from + at, kLine);
  }
  __builtin_memcpy(to + at, from + at, bytes - at);
}

#if defined(__SSE2__)
inline constexpr bool kCanStream = true;

// As memcpy, with streaming stores. They are ordered before later stores only by streamed().
inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t before = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  const std::size_t head = before < bytes ? before : bytes;
  __builtin_memcpy(to, from, head);
  std::size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    const auto* line = reinterpret_cast<const __m128i*>(from + at);
    auto* into = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1), c = _mm_loadu_si128(line + 2),
                  d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(into, a);
    _mm_stream_si128(into + 1, b);
    _mm_stream_si128(into + 2, c);
    _mm_stream_si128(into + 3, d);
  }
  __builtin_memcpy(to + at, from + at, bytes - at);
}
inline void streamed() { _mm_sfence(); }
#else
inline constexpr bool kCanStream = false;

inline void stream(std::byte* to, const std::byte* from, std::size_t bytes) { __builtin_memcpy(to, from, bytes); }
inline void streamed() {}
#endif

}  // namespace
}  // namespace sordino::kernels
