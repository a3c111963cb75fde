// Runs one block of a kernel: its threads as fibers on the calling thread.
//
// A fiber changes only where a thread waits: at a barrier, or in an exchange of its warp. Which thread comes next is a
// matter of the seed:
//
//   0      the first thread that is ready
//   other  in half of the blocks any thread that is ready; in the other half any lane of the first warp in a random
//          order of warps, so that one warp runs as far ahead of the others as barriers allow
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace on_cpu {

inline constexpr unsigned kMostThreads = 1024,
                          kWarp = 32;  // of all GPUs (programming guide, "technical specifications")

// Random numbers that are the same everywhere (splitmix64).
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  unsigned below(std::size_t n) { return static_cast<unsigned>(next() % n); }

 private:
  std::uint64_t state_;
};

class Block {
 public:
  // The block of the calling thread; `run` may be called again and again.
  static Block& of_this_thread();
  // The block that is running in the calling thread.
  static Block& running();

  void run(const std::function<void()>& body, dim3 grid, dim3 dim, unsigned index, unsigned seed);

  // Called by the block's threads.
  void barrier(Line line);
  void exchange(unsigned mask, const void* value, void* taken, std::size_t bytes, int from, Line line);
  unsigned vote(unsigned mask, bool value, Line line);

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

 private:
  struct Fiber {
    Place place{};
    void* stack_pointer = nullptr;
    std::byte* stack = nullptr;
    void* sanitizers_stack = nullptr;
  };
  // An exchange of a warp that some of its lanes wait for.
  struct Exchange {
    unsigned mask = 0, arrived = 0, votes = 0;
    std::size_t bytes = 0;
    Line line;
    std::array<std::array<std::byte, 8>, kWarp> values{};
    std::array<void*, kWarp> taken{};
    std::array<int, kWarp> from{};
  };
  struct Warp {
    unsigned live = 0, ready = 0;  // lanes
    Exchange exchange;
  };

  static void enter();
  unsigned thread() const { return now_->place.thread.x; }
  int pick();  // a thread that is ready, or -1
  void end_thread();
  Fiber& fiber_for(unsigned t);
  void start();
  void end();
  void suspend();
  void change_to(Fiber& next);
  void arrive_on_stack(void* sanitizers_stack);
  void set_ready(unsigned warp, unsigned lanes);
  Exchange& arrive(unsigned mask, std::size_t bytes, Line line);
  void leave(Exchange& exchange);
  std::string where(Line line) const;

  const std::function<void()>* body_ = nullptr;
  dim3 grid_, dim_, index_;
  Random random_{0};
  bool in_order_ = true, any_warp_ = false;
  unsigned live_ = 0, at_barrier_ = 0, ended_ = 0;
  Line barrier_;
  std::array<Warp, kMostThreads / kWarp> warps_;
  std::array<unsigned, kMostThreads / kWarp> warp_at_{}, position_of_{};  // the order of warps
  unsigned ready_ = 0;                         // positions of warps with lanes that are ready
  std::array<Fiber*, kMostThreads> fibers_{};  // of threads that have begun
  std::vector<std::unique_ptr<Fiber>> all_fibers_;
  std::vector<Fiber*> idle_;
  Fiber* now_ = nullptr;
  // The stack of the host, to which the last thread returns.
  void* host_ = nullptr;
  const void* host_stack_ = nullptr;
  std::size_t host_stack_bytes_ = 0;
  bool from_host_ = false;
};

}  // namespace on_cpu
