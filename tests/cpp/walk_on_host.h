// The grid of the CUDA kernels, run on the host one thread after the other: all of their code except the part below
// launch.cuh.
#pragma once

#include "kernels/cuda/plan.h"
#include "kernels/cuda/sum_ops.h"
#include "kernels_fixture.h"

namespace sordino::test {

namespace cuda = kernels::cuda;

// Elements at a chosen distance from a multiple of 64 bytes, with poison on both sides.
template <class T>
class Placed {
 public:
  explicit Placed(std::size_t count, std::size_t phase = 0)
      : count_(count), phase_(phase), bytes_(kGuard + phase + count * sizeof(T) + kGuard) {
    std::memset(bytes_.data(), kPoison, bytes_.size());
  }
  // Copies keep the phase, at any address.
  Placed(const Placed& other) : Placed(other.count_, other.phase_) {
    if (count_ != 0) std::memcpy(data(), other.data(), count_ * sizeof(T));
  }
  Placed& operator=(const Placed&) = delete;

  std::byte* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (kGuard - address % kGuard) + phase_;
  }
  const std::byte* data() const { return const_cast<Placed*>(this)->data(); }
  std::size_t size() const { return count_; }
  T get(std::size_t i) const {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  void set(std::size_t i, T value) { std::memcpy(data() + i * sizeof(T), &value, sizeof(T)); }
  bool guards_hold() const {
    const auto begin = static_cast<std::size_t>(data() - bytes_.data());
    for (std::size_t i = 0; i < bytes_.size(); ++i) {
      if ((i < begin || i >= begin + count_ * sizeof(T)) && bytes_[i] != std::byte{kPoison}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kPoison = 0xa5;
  std::size_t count_, phase_;
  std::vector<std::byte> bytes_;
};

template <class T>
Placed<T> random_placed(std::size_t count, std::size_t phase = 0) {
  Placed<T> placed(count, phase);
  for (std::size_t i = 0; i < count; ++i) placed.set(i, random_element<T>());
  return placed;
}

template <class T>
bool all_same(const Placed<T>& a, const Placed<T>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!same(a.get(i), b.get(i))) return false;
  }
  return true;
}
template <class T>
bool same_bytes(const Placed<T>& a, const Placed<T>& b) {
  return a.size() == b.size() && (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Offsets of a row's lists from a multiple of 64 bytes: none, the same for all lists, or different ones.
enum class Phases { kAligned, kAlike, kDifferent };
inline constexpr Phases kPhases[] = {Phases::kAligned, Phases::kAlike, Phases::kDifferent};

inline std::size_t phase_of(Phases phases, std::size_t list, std::size_t size) {
  if (phases == Phases::kAligned) return 0;
  return (phases == Phases::kAlike ? 3 : 3 + list) * size % 64;
}

template <class Operation>
void elementwise(const cuda::Table& table, const Operation& operation) {
  constexpr std::size_t kSize = sizeof(typename Operation::Element);
  const std::uint32_t chunk = cuda::chunk_bytes(table.elements() * kSize);
  cuda::plan(table, kSize, chunk, [&](const auto& batch, std::uint32_t chunks) {
    for (std::uint32_t block = 0; block < chunks; ++block) {
      for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) {
        typename Operation::State state = {};
        cuda::walk(batch, block, thread, cuda::kThreads, operation, state);
      }
    }
  });
}

template <class Operation, class Finish>
void sums(const cuda::Table& table, const Operation& operation, const Finish& finish) {
  using Sums = typename Operation::State;
  cuda::plan(table, sizeof(typename Operation::Element), cuda::kSumChunk, [&](const auto& batch, std::uint32_t chunks) {
    std::vector<Sums> of_chunks(chunks);
    for (std::uint32_t block = 0; block < chunks; ++block) {
      for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) {
        Sums sums;
        cuda::walk(batch, block, thread, cuda::kThreads, operation, sums);
        of_chunks[block].add(sums);
      }
    }
    for (std::uint32_t row = 0; row < batch.rows; ++row) {
      Sums sums;
      for (std::uint32_t thread = 0; thread < cuda::kThreads; ++thread) {
        sums.add(cuda::combine(batch, row, of_chunks.data(), thread, cuda::kThreads));
      }
      finish(cuda::Row{batch.row(row), batch.first_row + row}, sums);
    }
  });
}

}  // namespace sordino::test
