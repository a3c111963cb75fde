// Location: names a place in memory so that node peers can map it, or copy from it.
#pragma once

#include <cstdint>

#include "device/ticket.h"

namespace sordino {

struct Location {
  static constexpr std::uint64_t kPrivate = ~std::uint64_t{0};

  // 0: peers cannot reach the memory. kPrivate: they can copy from it, at address `key`, but not map it.
  std::uint64_t segment = 0;
  std::uint64_t bytes = 0;    // of the whole segment
  std::uint64_t offset = 0;   // of the place
  std::uint64_t key = 0;      // with which a peer finds host memory (a file descriptor, or an address)
  std::uint64_t file = 0;     // inode of the file, because the descriptor `key` may belong to another file later
  std::uint64_t openers = 0;  // device memory: the segment of its list of openers (openers.h), found by `key`
  std::uint64_t device = 0;   // identity of the device that has the memory; 0: host memory
  Ticket ticket{};            // with which a peer finds device memory
};

}  // namespace sordino
