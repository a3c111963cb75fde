// Openers: list of the processes that have a piece of device memory open, in memory that all of them share. CUDA
// forbids the owner to free the memory before they have closed it. A process that has died has closed everything.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <string>

#include "base/error.h"

namespace sordino {

// Zeroed memory is an empty list.
class Openers {
 public:
  using Entry = std::atomic<pid_t>;

  // Lists this process, or lists it once more. Throws TransportError if the list is full.
  Entry* enter() {
    for (Entry& entry : entries_) {
      pid_t unused = 0;
      if (entry.compare_exchange_strong(unused, getpid())) return &entry;
    }
    throw TransportError("more than " + std::to_string(entries_.size()) + " processes have mapped the same memory");
  }
  // In a forked child the entry is the parent's, which still has the memory open.
  static void leave(Entry* entry) {
    pid_t own = getpid();
    entry->compare_exchange_strong(own, 0);
  }
  bool none() const {
    for (const Entry& entry : entries_) {
      const pid_t pid = entry.load();
      if (pid != 0 && (kill(pid, 0) == 0 || errno != ESRCH)) return false;
    }
    return true;
  }

 private:
  std::array<Entry, 1024> entries_;
};
static_assert(std::atomic<pid_t>::is_always_lock_free);

}  // namespace sordino
