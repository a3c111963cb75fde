// Mailboxes: small messages between the processes of one machine. Each rank has a box with a doorbell, and in it one
// ring for each rank that may write to it.
#pragma once

#include <span>
#include <vector>

#include "base/wire.h"
#include "transport/doorbell.h"
#include "transport/ring.h"
#include "transport/transport.h"

namespace sordino::shm {

class Mailboxes {
 public:
  // `here`: world ranks that have a box, in order. `self`: index of this rank in `here`. `boxes[i]`: address of the box
  // of rank here[i], which has bytes_for() bytes.
  static std::size_t bytes_for(std::size_t ranks);
  Mailboxes(std::vector<int> here, int self, std::vector<std::byte*> boxes);

  // Post to rank here[to]. Inner messages are internal to the shared memory link.
  void post(int to, Bytes message) { add(to, message, 0); }
  void post_inner(int to, Bytes message) { add(to, message, kInner); }
  // Sends pending messages, and delivers received ones: inner messages to `inner`, others to `sink`, both with the
  // sender's world rank.
  bool poll(const Sink& sink, const Sink& inner = refuse);
  bool idle() const;
  Doorbell& bell(int index) { return *bells_[index]; }

 private:
  static constexpr std::uint32_t kInner = 1u << 31;  // flag in the length of an inner message

  struct Outgoing {
    Bytes bytes;  // length-prefixed messages that did not fit in the ring yet
    std::size_t sent = 0;
  };
  static void refuse(int from, std::span<const std::byte> message);
  void add(int to, const Bytes& message, std::uint32_t flag);
  bool flush(int to);
  bool read(std::size_t writer);
  bool deliver(std::size_t writer, const Sink& sink, const Sink& inner);

  std::vector<int> here_;
  int self_;
  std::vector<Doorbell*> bells_;
  std::vector<Ring> to_, from_;  // to and from each rank of here_
  std::vector<Outgoing> outgoing_;
  std::vector<Bytes> incoming_;
};

}  // namespace sordino::shm
