// Bulk data between the processes of one machine that do not map each other's memory for it: a ring for each direction
// between two ranks, made when the first transfer takes it. What comes before somebody waits for it is kept.
//
// A message goes in chunks: a head that says its tag, its length and where the chunk lies in it, then the bytes. One
// that is given up half way ends with a chunk that says so, and is never received. It has been sent when its receiver
// has taken it out of the ring, so that whoever leaves then, and takes the ring along, takes no message along.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "transport/shm/memory.h"
#include "transport/shm/ring.h"
#include "transport/transport.h"

namespace sordino::shm {

class Pipes {
 public:
  // `here`: the world ranks that there are pipes to; `tell(index, place)` tells here[index] where this rank's pipe to
  // it lies; `ring(index)` wakes it.
  Pipes(ShmMemory& memory, std::vector<int> here, std::function<void(int, const Location&)> tell,
        std::function<void(int)> ring);

  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data);
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data);
  // here[from] has made its pipe to this rank.
  void open(int from, const Location& place);
  bool poll();

 private:
  struct Sending {
    Tag tag;
    std::span<const std::byte> data;
    std::size_t sent = 0;
    bool begun = false, done = false, dropped = false;
    std::uint64_t end = 0;  // how much the ring's reader has taken when it has all of it
  };
  struct Receiving {
    Tag tag;
    std::span<std::byte> data;
    bool done = false, dropped = false;
    std::string error = {};
  };
  struct Head {
    Tag tag;
    std::uint32_t bytes;  // of this chunk; none of a message that is longer than its offset: it has been given up
    std::uint64_t offset, total;
  };
  struct Message {
    Head first;
    std::size_t arrived = 0;
    std::shared_ptr<Receiving> taker = {};
    Bytes early = {};  // what came before there was a taker
  };
  struct Outgoing {
    std::shared_ptr<Segment> segment;
    std::optional<Ring> ring;
    std::deque<std::shared_ptr<Sending>> queue, taken_soon;  // the latter: all of them is in the ring
  };
  struct Incoming {
    std::optional<Ring> ring;
    std::optional<Head> head;  // of the chunk whose bytes are coming
    std::shared_ptr<Message> message;
    std::list<std::shared_ptr<Message>> unclaimed;  // in the order in which they came
    std::list<std::shared_ptr<Receiving>> waiting;  // in the order in which they were posted
  };
  class SendTransfer;
  class ReceiveTransfer;

  bool push(std::size_t to);
  static bool confirm(Outgoing& out);
  bool pull(std::size_t from);
  void begin(Incoming& in, const Head& head);
  void fill(Incoming& in, std::size_t bytes);
  void hand_over(std::size_t from, Message& message, const std::shared_ptr<Receiving>& taker);

  ShmMemory& memory_;
  const std::vector<int> here_;
  const std::function<void(int, const Location&)> tell_;
  const std::function<void(int)> ring_;
  std::vector<Outgoing> out_;
  std::vector<Incoming> in_;
};

}  // namespace sordino::shm
