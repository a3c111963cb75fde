// Copies to memory that other processors read.
//
// Before a processor writes a cache line that another one has read, it must take the line back. If the two share a
// cache, this costs little. Otherwise (another socket or core complex) it takes 10 times as long as the write itself.
// Streaming stores bypass the caches, and do not wait for lines. But the reader then reads from memory, so they lose
// where processors share a cache. Which of the two holds depends on where the processes run, which the kernel or a
// hypervisor may change at any time. So copies are timed, and the way of copying follows (StoreChoice).
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace sordino::kernels {

// Smaller copies never use streaming stores: to wait for memory would take longer than to take back the lines.
inline constexpr std::size_t kLeastStreamed = 4096;

// Copies `bytes` bytes to memory that peers read after a later release store. No overlap.
void publish(std::byte* to, const std::byte* from, std::size_t bytes);
// Whether published data currently bypass the caches.
bool streams();
// Fixes the way of copying; nothing: back to the choice by times. Streaming stores exist on x86-64 only.
void set_streams(std::optional<bool> streams);

// Chooses between ordinary and streaming stores by the times of earlier copies. May be used by several threads: a lost
// sample does no harm.
class StoreChoice {
 public:
  struct Plan {
    bool streaming;
    bool timed;  // took() wants to know the duration
  };

  Plan plan();
  void took(bool streaming, std::size_t bytes, double nanoseconds);
  bool streaming() const { return streaming_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint32_t kSamples = 4;       // a way is judged by the least of its latest times
  static constexpr std::uint32_t kTimedEvery = 8;    // copies
  static constexpr std::uint32_t kTriedEvery = 256;  // copies, of which one is done in the other way
  // Between processors that share a cache, an ordinary copy takes up to 2.6 times as long as a streaming one, but saves
  // as much when it is read. Between processors without a common cache it takes 10 to 20 times as long.
  static constexpr float kWorthIt = 4;

  struct Way {
    std::array<std::atomic<float>, kSamples> times = {};  // in ns per byte
    std::atomic<std::uint32_t> count = 0;
  };
  static float least(const Way& way);

  std::array<Way, 2> ways_;  // ordinary stores, streaming stores
  std::atomic<std::uint32_t> copies_ = 0;
  std::atomic<bool> streaming_ = false;
};

}  // namespace sordino::kernels
