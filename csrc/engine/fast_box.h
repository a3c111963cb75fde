// Fast box: the messages of one rank to a node peer, in a ring in memory that both map. The sender owns the memory and
// creates it for its first message. A message is an envelope and its payload.
//
//   sender     waits until the whole message fits, and writes it in chunks. Each chunk can be read at once
//   receiver   takes the chunks that have arrived, and does other work until the rest arrives
//
// A sender that has begun a message completes it without a wait. So only a dead sender leaves an incomplete message.
#pragma once

#include <algorithm>
#include <atomic>
#include <span>

#include "engine/message.h"
#include "transport/ring.h"

namespace sordino {

class FastBox {
 public:
  // Holds four of the largest messages, and fits in a core's cache.
  static constexpr std::size_t kCapacity = 320 * 1024;
  static constexpr std::size_t bytes() { return sizeof(Head) + Ring::bytes_for(kCapacity); }

  // `memory`: bytes() bytes, zeroed before either side begins.
  explicit FastBox(std::byte* memory)
      : head_(reinterpret_cast<Head*>(memory)), ring_(memory + sizeof(Head), kCapacity) {}

  // The sender's side. Returns whether there is room for a message with this payload. If not, the receiver rings when
  // it has made room.
  bool has_room(std::size_t payload) {
    const std::size_t needed = sizeof(Envelope) + payload;
    if (ring_.room() >= needed) return true;
    // Both sides exchange the flag atomically. So either the receiver sees the flag, or the sender sees the room.
    head_->sender_waits.exchange(true);
    return ring_.room() >= needed;
  }
  // Writes a message for which there is room. Calls wake() after the first chunk and after the last one.
  template <class Wake>
  void write(const Envelope& envelope, std::span<const std::byte> payload, Wake&& wake) {
    ring_.put(&envelope, sizeof(envelope));
    std::size_t sent = 0;
    do {
      const std::size_t chunk = std::min(kChunk, payload.size() - sent);
      ring_.put(payload.data() + sent, chunk);
      ring_.publish();
      sent += chunk;
      if (sent == chunk || sent == payload.size()) wake();
    } while (sent < payload.size());
  }
  // Tells the receiver that announced data may change from now on.
  void close() { head_->closed.store(true, std::memory_order_release); }
  // Bytes of messages that receives have taken so far, as the receiver counts them.
  std::uint64_t consumed() const { return head_->consumed.load(std::memory_order_acquire); }

  // The receiver's side.
  Ring& ring() { return ring_; }
  bool closed() const { return head_->closed.load(std::memory_order_acquire); }
  void consume(std::uint64_t bytes) {
    consumed_ += bytes;
    head_->consumed.store(consumed_, std::memory_order_release);
  }
  // Gives the space of taken bytes back to the sender. True if the sender waits for it, and must be woken.
  bool release() {
    ring_.release();
    return head_->sender_waits.exchange(false);
  }

 private:
  static constexpr std::size_t kChunk = 16 * 1024;

  struct Head {
    alignas(64) std::atomic<std::uint64_t> consumed;
    alignas(64) std::atomic<bool> sender_waits;
    std::atomic<bool> closed;
  };

  Head* head_;
  Ring ring_;
  std::uint64_t consumed_ = 0;
};

}  // namespace sordino
