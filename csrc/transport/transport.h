// Transport: interface that moves bytes between the ranks of a world.
//
// A rank sends in three ways: post() for small control messages (buffered, ordered per pair), send()/receive() for bulk
// data directly from and to the caller's memory, and NodeMemory for memory that the ranks of one node share. One thread
// at a time uses a transport (the polling thread). Only ring(rank()), and the allocation functions and locate() of
// NodeMemory, may be called from any thread.
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

// A bulk transfer in flight. Destroying an unfinished one abandons it.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool test() = 0;  // true once the buffer may be used again; throws on failure
};

struct Loss {
  int rank;
  std::string cause;
  bool certain = true;  // true: its process has ended; false: it cannot be reached, but may be alive
};

using Tag = std::uint32_t;
inline constexpr int kTagBits = 27;  // tags are below 2^27
// The upper bits of a tag identify a process set. Their last value is for transfers that belong to no operation of a
// set. An operation uses the lowest kTagLaneBits bits to number its concurrent transfers (lanes).
inline constexpr int kTagSequenceBits = 14;
inline constexpr int kTagLaneBits = 2;
inline constexpr int kTagSets = (1 << (kTagBits - kTagSequenceBits)) - 1;
// Value of the upper bits for the set with this id. Set 0, of all ranks, shares its value with no other set. The other
// values repeat, so a new set gets an id only if none of its members is in another set with the same value.
constexpr int tag_set_of(std::int64_t set) { return set == 0 ? 0 : 1 + static_cast<int>((set - 1) % (kTagSets - 1)); }
using Sink = std::function<void(int from, std::span<const std::byte> message)>;

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& node_of() const = 0;  // node number of every rank; rank 0 is on node 0
  virtual double ranks_per_core() const = 0;            // of the cores that this rank may run on
  virtual std::string host_of(int rank) const = 0;
  virtual int process_of(int rank) const = 0;  // its process id on its host
  virtual std::string name() const = 0;

  virtual void post(int to, Bytes message) = 0;
  virtual bool poll(const Sink& sink) = 0;  // delivers received messages; true if anything moved
  virtual std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) = 0;
  virtual bool idle() const = 0;  // true if all posted messages have left

  virtual NodeMemory& node_memory() = 0;
  // True if the ranks on the node of `rank` can map each other's segments; the same on all ranks.
  virtual bool node_shares_memory(int rank) const = 0;
  bool shares_memory() const { return node_shares_memory(rank()); }
  // True if send() and receive() accept device memory.
  virtual bool takes_device_memory() const = 0;

  // Sleeping: take a ticket, check once more for work, then sleep(ticket, limit). ring(rank) ends the sleep of `rank`,
  // which is this rank or a rank of its node.
  virtual std::uint32_t ticket() = 0;
  virtual void sleep(std::uint32_t ticket, std::chrono::microseconds limit) = 0;
  virtual void ring(int rank) = 0;
  // Keeps a segment of this rank until no peer needs to map it any more, even if this rank leaves early.
  virtual void keep(std::shared_ptr<Segment> segment) = 0;

  // False if work (messages from other nodes) can arrive without a ring. Then a sleep must stay short.
  virtual bool rings_always() const = 0;

  // Ranks lost since the last call.
  virtual std::vector<Loss> take_losses() = 0;
  // From now on control messages to and from lost ranks fail silently, and take_losses() reports the ranks. Bulk
  // transfers with them throw PeerLost as before.
  virtual void tolerate_losses() = 0;
  // Called once when the world has failed, so that closing waits for no rank.
  virtual void abandon() = 0;
};

}  // namespace sordino
