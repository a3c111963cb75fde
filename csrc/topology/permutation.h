// A random permutation of [0, size). It is computed, not stored: a value or an inverse takes constant time and memory.
// Both are the same on every rank that has the key.
//
// Up to kTable elements, it is a stored shuffle. For more, it is a Feistel network on pairs (left, right), where the
// number of pairs is `size` or a little more. Values outside [0, size) pass through the network again ("cycle walking",
// Black and Rogaway 2002). This is seldom needed, and keeps it a bijection.
#pragma once

#include <array>
#include <cstdint>

namespace sordino::topology {

class Permutation {
 public:
  Permutation(std::uint32_t size, std::uint64_t key);

  std::uint32_t operator()(std::uint32_t element) const;
  std::uint32_t inverse(std::uint32_t image) const;

 private:
  static constexpr std::uint32_t kTable = 64;
  static constexpr int kRounds = 8;

  std::uint32_t forward(std::uint32_t element) const;
  std::uint32_t backward(std::uint32_t image) const;

  const std::uint32_t size_;
  std::uint32_t left_ = 0, right_ = 0;  // extents of the two halves
  std::array<std::uint64_t, kRounds> keys_;
  std::array<std::uint8_t, kTable> image_, preimage_;
};

}  // namespace sordino::topology
