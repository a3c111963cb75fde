// Doorbell: a futex in (possibly shared) memory, on which one rank sleeps and which others ring. A ring between
// ticket() and sleep() is never lost. Ringing a rank that is awake makes no system call.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace sordino {

struct alignas(64) Doorbell {
  std::atomic<std::uint32_t> rings{0};
  std::atomic<std::uint32_t> sleepers{0};

  std::uint32_t ticket() const { return rings.load(std::memory_order_seq_cst); }

  void sleep(std::uint32_t seen, std::chrono::microseconds limit) {
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    if (rings.load(std::memory_order_seq_cst) == seen) {
      const timespec wait{static_cast<time_t>(limit.count() / 1000000),
                          static_cast<long>(limit.count() % 1000000) * 1000};
      syscall(SYS_futex, &rings, FUTEX_WAIT, seen, &wait, nullptr, 0);
    }
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  void ring() {
    rings.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0)
      syscall(SYS_futex, &rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace sordino
