// Ring: circular byte buffer in shared memory with one writer and one reader. Its two counters only grow, so it needs
// no lock, which a killed process could hold. Each side has its own Ring object. The reader sees bytes after publish();
// the writer sees free space after release().
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace sordino {

class Ring {
 public:
  static constexpr std::size_t bytes_for(std::size_t capacity) { return sizeof(Head) + capacity; }

  // `memory`: bytes_for(capacity) bytes, zeroed before either side begins.
  Ring(std::byte* memory, std::size_t capacity)
      : head_(reinterpret_cast<Head*>(memory)), data_(memory + sizeof(Head)), capacity_(capacity) {}

  // The writer's side.
  std::size_t room() const { return capacity_ - distance(put_, head_->read.load(std::memory_order_acquire)); }
  void put(const void* from, std::size_t bytes) {  // at most room() bytes
    if (bytes == 0) return;
    const std::size_t at = put_ % capacity_, first = std::min(bytes, capacity_ - at);
    std::memcpy(data_ + at, from, first);
    std::memcpy(data_, static_cast<const std::byte*>(from) + first, bytes - first);
    put_ += bytes;
  }
  void publish() { head_->written.store(put_, std::memory_order_release); }
  // Number of bytes put so far, and whether the reader has taken that many.
  std::uint64_t put_so_far() const { return put_; }
  bool has_taken(std::uint64_t so_far) const { return head_->read.load(std::memory_order_acquire) >= so_far; }

  // The reader's side.
  std::size_t ready() const { return distance(head_->written.load(std::memory_order_acquire), taken_); }
  void take(void* into, std::size_t bytes) {  // at most ready() bytes
    if (bytes == 0) return;
    const std::size_t at = taken_ % capacity_, first = std::min(bytes, capacity_ - at);
    std::memcpy(into, data_ + at, first);
    std::memcpy(static_cast<std::byte*>(into) + first, data_, bytes - first);
    taken_ += bytes;
  }
  void skip(std::size_t bytes) { taken_ += bytes; }
  void release() { head_->read.store(taken_, std::memory_order_release); }

 private:
  struct Head {
    alignas(64) std::atomic<std::uint64_t> written;
    alignas(64) std::atomic<std::uint64_t> read;
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

  // Distance of two counters. Throws if a peer has damaged them, so that this side never leaves the ring.
  std::size_t distance(std::uint64_t ahead, std::uint64_t behind) const {
    if (ahead - behind > capacity_) throw TransportError("a ring in shared memory is damaged");
    return ahead - behind;
  }

  Head* head_;
  std::byte* data_;
  std::size_t capacity_;
  std::uint64_t put_ = 0, taken_ = 0;
};

}  // namespace sordino
