// Stateless random numbers: each is a hash of its purpose. All ranks get the same number for the same purpose, in any
// order, without a state to seed, keep or exchange.
#pragma once

#include <cstdint>

namespace sordino::rng {

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014): every input bit changes every output bit.
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// Derives the key for one purpose from a key for several purposes, as in key(key(seed, round), segment).
constexpr std::uint64_t key(std::uint64_t parent, std::uint64_t child) {
  return mix(parent + 0x9e3779b97f4a7c15u * (child + 1));
}

// A number in [0, bound) from 64 random bits. Its bias is below bound / 2^64.
constexpr std::uint64_t below(std::uint64_t bits, std::uint64_t bound) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(bits) * bound >> 64);
}

// A number in [0, 1) from 64 random bits.
constexpr double unit(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace sordino::rng
