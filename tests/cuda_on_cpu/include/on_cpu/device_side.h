// What a kernel sees: its place in the grid, barriers, exchanges within a warp, counts of bits, and atomic additions.
//
// A thread of a block is a fiber. Fibers change only in the functions below, so a thread that forgets a barrier runs
// ahead of the others, or behind them, as the seed of the order says.
#pragma once

#include <cstdint>
#include <source_location>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
// A block runs in one thread of the host, and the blocks of that thread run one after the other.
#define __shared__ thread_local

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace on_cpu {

struct Place {
  dim3 thread, block, block_dim, grid_dim;
};
extern constinit thread_local const Place* here;  // of the thread that runs; null outside of kernels
inline const Place& place() { return *here; }
inline int lane() { return static_cast<int>(place().thread.x % 32); }

using Line = std::source_location;
void sync_block(Line line);
// Waits for the lanes of `mask`, and copies `bytes` bytes of lane `from` (of this one, if that is no lane).
void exchange(unsigned mask, const void* value, void* taken, std::size_t bytes, int from, Line line);
// Waits for the lanes of `mask`. Returns the lanes that gave true.
unsigned vote(unsigned mask, bool value, Line line);

template <class T>
T exchanged(unsigned mask, T value, int from, Line line) {
  static_assert(sizeof(T) <= 8 && std::is_arithmetic_v<T>);  // the types that CUDA has these functions for
  T taken{};
  exchange(mask, &value, &taken, sizeof(T), from, line);
  return taken;
}

}  // namespace on_cpu

#define threadIdx (::on_cpu::place().thread)
#define blockIdx (::on_cpu::place().block)
#define blockDim (::on_cpu::place().block_dim)
#define gridDim (::on_cpu::place().grid_dim)

inline void __syncthreads(on_cpu::Line line = on_cpu::Line::current()) { on_cpu::sync_block(line); }
inline void __syncwarp(unsigned mask = ~0u, on_cpu::Line line = on_cpu::Line::current()) {
  on_cpu::vote(mask, false, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int from, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::exchanged(mask, value, from & 31, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::exchanged(mask, value, on_cpu::lane() + static_cast<int>(distance), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::exchanged(mask, value, on_cpu::lane() - static_cast<int>(distance), line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::exchanged(mask, value, on_cpu::lane() ^ bits, line);
}
inline unsigned __ballot_sync(unsigned mask, bool value, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::vote(mask, value, line);
}
inline bool __any_sync(unsigned mask, bool value, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::vote(mask, value, line) != 0;
}
inline bool __all_sync(unsigned mask, bool value, on_cpu::Line line = on_cpu::Line::current()) {
  return on_cpu::vote(mask, value, line) == mask;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// Blocks of two streams may add to the same number at once.
template <class T>
  requires std::is_integral_v<T>
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
