// Process set: some ranks of the world, with their own order of operations.
#pragma once

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "collectives/one_shot.h"
#include "collectives/participants.h"
#include "engine/negotiation.h"
#include "engine/running.h"

namespace sordino {

// Settings that all sets of a world share.
struct SetOptions {
  std::size_t slot_bytes;  // 0 if the ranks of a node do not share memory
  int patience;            // see Participants
  std::size_t fusion_bytes;
  std::shared_ptr<GivenIds> given;  // ids that this rank has given as a coordinator
};

class ProcessSet {
 public:
  ProcessSet(int id, std::vector<int> ranks, Transport& transport, TrafficCounters& traffic, const SetOptions& options);

  // This rank leaves the world. Its block stays for peers that have yet to map it, and memory that they may still read.
  void leave_block() {
    for (auto segment : {std::move(own_block_), staging_.segment()}) {
      if (segment) transport_.keep(std::move(segment));
    }
  }
  const std::shared_ptr<Segment>& block() const { return own_block_; }
  // Location of this rank's block, for the node peers; segment 0 without a block.
  Location block_location() const;
  std::vector<int> node_peers() const;
  // Maps the block of a node peer. Throws TransportError if the location is wrong, if the peer has sent one before, or
  // if this process cannot map more memory. A peer that has already ended is no error.
  void connect(int rank, const Location& block);
  // True once all blocks that this rank can map are there.
  bool ready() const { return unconnected_.empty(); }
  const std::set<int>& unconnected() const { return unconnected_; }

  // Participants of the next operation, as a decision names them; null if this rank is not one of them.
  std::unique_ptr<Participants> gather(const std::vector<int>& members);
  // Number of the last operation that was gathered; the same on all members.
  std::uint64_t sequence() const { return sequence_; }
  // World ranks of the members that share memory with this rank, but ended before it could map their blocks.
  std::vector<int> unmapped(const std::vector<int>& members) const;
  // Keeps what an ended operation leaves to the next, and remembers its operations for repeats.
  void remember(Running& over);
  // Null until all members of this node have sent the locations of their blocks.
  OneShot* one_shot() { return one_shot_.get(); }
  // A member has left the world.
  void leave(int index, const Departure& departure);
  // A one-shot message has come.
  void receive(int member, const OneShot::Partial& what, std::span<const std::byte> data);

  int index_of(int rank) const {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  }
  int coordinator() const { return ranks.front(); }

  const int id;
  const std::vector<int> ranks;
  const int me;                            // index of this rank in `ranks`; -1 if it is no member
  std::optional<Negotiation> negotiation;  // on the coordinator only
  std::deque<Decision> decisions;          // received but not begun
  std::set<std::string> stalled;           // undecided names for which the coordinator has reported missing ranks
  std::optional<Running> running;
  std::map<std::uint64_t, PeerLost> given_up;  // by other members, before this rank has begun them; by sequence()
  NcclChannels channels;
  std::atomic<int> in_flight{0};  // operations between submit and finish
  // Announced operations that have not ended, by their names of repeats, and the joins among them. Guarded by the
  // scheduler's mutex.
  std::map<std::string, int, std::less<>> announced;
  int joins = 0;

  // A turn that this rank has entered.
  struct InTurn {
    std::shared_ptr<const Repeat> repeat;
    std::string name;  // of the submission; empty if a thread waits in the call (World::repeat)
    AwakeTime awaited_since;
    bool warned = false;
  };
  std::optional<InTurn> entered;
  std::optional<Time> awaited_since;  // the reverse case: others have entered, and wait for this rank
  double timeout_s = 0;               // of its operations on this rank; 0: the world's (SORDINO_TIMEOUT_S)
  // The last operation whose turn had no result. This rank announces it next time, as the other ranks do, instead of
  // entering another turn with it.
  std::shared_ptr<const Repeat> refused;
  bool take_refused(const std::shared_ptr<const Repeat>& repeat) {
    if (refused != repeat) return false;
    refused.reset();
    return true;
  }
  // Decisions wait while the turn is open in which this rank has entered an operation that has a place in their order.
  bool holds_decisions() const { return entered && !entered->repeat->carried; }

 private:
  std::size_t block_bytes(int rank) const;
  void open_one_shot();
  void finish_opening();
  void send_partial(int member, const OneShot::Partial& what, std::span<const std::byte> data);

  Transport& transport_;
  TrafficCounters& traffic_;
  const SetOptions options_;
  std::shared_ptr<Segment> own_block_;
  std::vector<SharedBlock*> blocks_;  // by member; null if on another node
  bool crowded_ = false;              // equal on all members of this node
  std::set<int> unconnected_;         // node peers whose block locations have not come yet
  std::set<int> gone_;                // node peers whose blocks had gone before this rank could map them
  std::uint64_t sequence_ = 0;
  SlotUse slot_use_;
  ReceiveBuffer staging_;
  std::unique_ptr<OneShotSlots> own_slots_;  // used where this rank shares no memory
  std::unique_ptr<OneShot> one_shot_;
  // Messages for one_shot_ that have come before it was there: other nodes do not wait for the blocks of this node.
  struct Early {
    int member;
    OneShot::Partial what;
    Bytes data;
  };
  std::vector<Early> early_;
  std::set<int> left_;

 public:
  SharedDevices devices;  // declared last, so destroyed first: its words are in the blocks
};

// A removed set. Peers that have yet to remove it look at the slots in its block. Devices may still write words to the
// blocks of their peers, and the driver has these pinned. So each rank's block stays until all peers have released it,
// or to the end if one has left without that: its object of the world, with these devices, may live longer.
struct Leaving {
  int id;
  std::shared_ptr<ProcessSet> set;      // until this rank's devices have finished; then null
  std::weak_ptr<QueueBarrier> barrier;  // a thread may still look at it
  std::shared_ptr<Segment> block;
  std::vector<int> peers;  // members on this node
  bool told = false;       // the peers know that this rank uses their blocks no more
};

}  // namespace sordino
