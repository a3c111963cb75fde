// One abstract class moves bytes between the ranks of a world; nothing above it knows how.
//
// Three ways out of a rank: post() for small control messages (buffered, ordered per pair), send()/receive() for
// bulk data straight from and into the caller's memory, and NodeMemory for memory that the ranks of one node share.
// A transport is used by one thread at a time (the engine's driver); only ring() of the own rank, and the allocation
// functions of NodeMemory, may be called from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "transport/node_memory.h"

namespace sordino {

// A bulk transfer under way. Dropping an unfinished one abandons it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool test() = 0;  // true once the buffer may be used again; throws on failure
};

struct Loss {
  int rank;
  std::string cause;
  bool certain = true;  // its process has ended; else it cannot be reached, and may live
};

using Tag = std::uint32_t;
inline constexpr int kTagBits = 27;  // tags are below 2^27
// The upper bits are a process set's, but for the last value, which is for what is no operation of a set. Of the
// others, an operation of a set has the lowest for what it sends side by side.
inline constexpr int kTagSequenceBits = 14;
inline constexpr int kTagLaneBits = 2;
inline constexpr int kTagSets = (1 << (kTagBits - kTagSequenceBits)) - 1;
// Which of the upper bits the set with this id has. Those of set 0, of all ranks, no other set shares; the others come
// round, so an id is given only where no member has a set with the same.
constexpr int tag_set_of(std::int64_t set) { return set == 0 ? 0 : 1 + static_cast<int>((set - 1) % (kTagSets - 1)); }
using Sink = std::function<void(int from, std::span<const std::byte> message)>;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& node_of() const = 0;  // node number of every rank, 0 = node of rank 0
  virtual int machine_size() const = 0;                 // ranks that share this rank's cores, itself among them
  virtual std::string host_of(int rank) const = 0;
  virtual std::string name() const = 0;

  virtual void post(int to, Bytes message) = 0;
  virtual bool poll(const Sink& sink) = 0;  // delivers what has arrived; true if anything moved
  virtual std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) = 0;
  virtual bool idle() const = 0;  // every posted message has left

  virtual NodeMemory& node_memory() = 0;
  // Whether the ranks of that rank's node can map each other's segments, which all ranks say alike.
  virtual bool node_shares_memory(int rank) const = 0;
  bool shares_memory() const { return node_shares_memory(rank()); }
  // Whether send() and receive() take device memory.
  virtual bool takes_device_memory() const = 0;

  // Sleeping: take a ticket, look once more whether there is work, then sleep(ticket, limit); ring(rank) ends it.
  // ring() may address this rank and the ranks of its node.
  virtual std::uint32_t ticket() = 0;
  virtual void sleep(std::uint32_t ticket, std::chrono::microseconds limit) = 0;
  virtual void ring(int rank) = 0;
  // Keeps a segment of this rank until no peer can want to map it any more, however early this rank leaves.
  virtual void keep(std::shared_ptr<Segment> segment) = 0;

  // False when work can arrive without a ring (messages from other nodes), so that a sleep must stay short.
  virtual bool rings_always() const = 0;

  // Ranks that have been lost since the last call.
  virtual std::vector<Loss> take_losses() = 0;
  // From now on control messages to and from ranks that are lost fail quietly, and take_losses() tells of them. Bulk
  // transfers with them throw PeerLost as before.
  virtual void outlive_peers() = 0;
  // Called once when the world has failed, so that closing does not wait for anybody.
  virtual void abandon() = 0;
};

}  // namespace sordino
