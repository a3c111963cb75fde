// Copies to memory that other processors read.
//
// Before a processor writes a cache line that another one has read, it must take the line back. If the two share a
// cache, this costs little. Otherwise (another socket or core complex) it takes 10 times as long as the write itself.
// Streaming stores bypass the caches, and do not wait for lines. But then the reader reads from memory, so they are
// slower between processors that share a cache. Whether processors share one depends on where the processes run, which
// the operating system or a hypervisor may change at any time. So StoreChoice chooses by the times of copies.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace sordino::kernels {

// Copies of fewer bytes never use streaming stores: waiting for memory would take longer than taking back the lines.
inline constexpr std::size_t kLeastStreamed = 4096;

// Copies `bytes` bytes to memory that peers read after a later release store. The ranges must not overlap.
void publish(std::byte* to, const std::byte* from, std::size_t bytes);
// Whether published data currently bypass the caches.
bool streams();
// Fixes the kind of stores; std::nullopt: choose by times again. Without effect except on x86-64.
void set_streams(std::optional<bool> streams);

// Chooses between ordinary and streaming stores by the times of earlier copies. Several threads may use it: a lost
// sample does no harm.
class StoreChoice {
 public:
  struct Plan {
    bool streaming;
    bool timed;  // pass the duration to took()
  };

  Plan plan();
  void took(bool streaming, std::size_t bytes, double nanoseconds);
  bool streaming() const { return streaming_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::uint32_t kSamples = 4;       // a kind of stores is judged by the least of its latest times
  static constexpr std::uint32_t kTimedEvery = 8;    // copies
  static constexpr std::uint32_t kTriedEvery = 256;  // copies, of which one uses the other kind of stores
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
