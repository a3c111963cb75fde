// Guarded, misaligned buffers of random elements for the kernel tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels_reference.h"

namespace sordino::test {

// Returns random bits that are the same with every standard library.
inline std::uint64_t random_bits() {
  static std::uint64_t state = 20240607;
  std::uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
inline std::size_t random_below(std::size_t n) { return random_bits() % n; }

// Elements at any address, with poison on both sides. A read-only buffer ends with its allocation, so that a sanitizer
// sees reads beyond its end.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count, bool written = true)
      : count_(count), start_(kGuard + random_below(17)), bytes_(start_ + count * sizeof(T) + (written ? kGuard : 0)) {
    std::memset(bytes_.data(), kPoison, bytes_.size());
  }
  std::byte* data() { return bytes_.data() + start_; }
  const std::byte* data() const { return bytes_.data() + start_; }
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  void set(std::size_t i, T value) { std::memcpy(data() + i * sizeof(T), &value, sizeof(T)); }
  bool guards_hold() const {
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      const bool outside = i < start_ || i >= start_ + count_ * sizeof(T);
      if (outside && bytes_[i] != std::byte{kPoison}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xa5;
  std::size_t count_, start_;
  std::vector<std::byte> bytes_;
};

// Mostly ordinary numbers, so that sums stay finite; some edge cases and arbitrary bits.
template <class T>
T random_element() {
  T value;
  if constexpr (std::is_same_v<T, Bool>) {
    value.byte = random_bits() & 1;
  } else if constexpr (is_float<T>) {
    constexpr double tiny = sizeof(T) == 8 ? 5e-324 : std::is_same_v<T, Half> ? 6e-8 : 1.5e-40;
    const double edges[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, tiny, -3 * tiny, 1e300};
    const std::size_t kind = random_below(16);
    from_double((static_cast<double>(random_bits() >> 11) / (1ull << 52) - 1) * 8, value);
    if (kind == 0) from_double(edges[random_below(8)], value);
    if (kind == 1) {
      const std::uint64_t bits = random_bits();
      std::memcpy(&value, &bits, sizeof value);
    }
  } else {
    constexpr T min = std::numeric_limits<T>::min(), max = std::numeric_limits<T>::max();
    const T edges[] = {min, max, static_cast<T>(min + 1), static_cast<T>(max - 1), static_cast<T>(max / 2 + 1), 0, 1};
    value = random_below(4) ? static_cast<T>(random_bits()) : edges[random_below(7)];
  }
  return value;
}

template <class T>
Buffer<T> random_buffer(std::size_t count, bool written = true) {
  Buffer<T> buffer(count, written);
  for (std::size_t i = 0; i < count; ++i) buffer.set(i, random_element<T>());
  return buffer;
}

template <class T>
bool equals(const Buffer<T>& got, const std::vector<T>& expected) {
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!same(got.get(i), expected[i])) return false;
  }
  return true;
}

}  // namespace sordino::test
