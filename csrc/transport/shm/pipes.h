// Pipes: bulk data between processes of one machine that do not map each other's memory for it. Each direction between
// two ranks has a ring, created by the first transfer. Data that comes before its receive is kept.
//
// A message is sent in chunks: a head (tag, total length, and offset of the chunk), then the bytes. A message that is
// given up half way ends with an empty chunk, and is never received. A message counts as sent once its receiver has
// taken all of it out of the ring. So a rank that then leaves, whose ring ends with it, loses no message.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "transport/ring.h"
#include "transport/shm/memory.h"
#include "transport/transport.h"

namespace sordino::shm {

class Pipes {
 public:
  // `here`: world ranks that have pipes. `tell(index, place)` sends the location of this rank's pipe to here[index].
  // `ring(index)` wakes that rank.
  Pipes(ShmMemory& memory, std::vector<int> here, std::function<void(int, const Location&)> tell,
        std::function<void(int)> ring);

  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data);
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data);
  // Maps the pipe that here[from] has created to this rank.
  void open(int from, const Location& place);
  bool poll();

 private:
  struct Sending {
    Tag tag;
    std::span<const std::byte> data;
    std::size_t sent = 0;
    bool begun = false, done = false, dropped = false;
    std::uint64_t end = 0;  // value of the ring's read counter when all of the message has been taken
  };
  struct Receiving {
    Tag tag;
    std::span<std::byte> data;
    bool done = false, dropped = false;
    std::string error = {};
  };
  struct Head {
    Tag tag;
    std::uint32_t bytes;  // of this chunk; 0 before the end of a message: it has been given up
    std::uint64_t offset, total;
  };
  struct Message {
    Head first;
    std::size_t arrived = 0;
    std::shared_ptr<Receiving> taker = {};
    Bytes early = {};  // bytes that came before there was a taker
  };
  struct Outgoing {
    std::shared_ptr<Segment> segment;
    std::optional<Ring> ring;
    std::deque<std::shared_ptr<Sending>> queue, taken_soon;  // messages to put in the ring; messages all in it
  };
  struct Incoming {
    std::optional<Ring> ring;
    std::optional<Head> head;  // of the chunk that is being received
    std::shared_ptr<Message> message;
    std::list<std::shared_ptr<Message>> unclaimed;  // in the order of their arrival
    std::list<std::shared_ptr<Receiving>> waiting;  // in the order of the receives
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
