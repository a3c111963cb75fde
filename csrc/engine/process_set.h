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

#include "base/counted.h"
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
  std::shared_ptr<GivenIds> given;  // set ids that this rank has assigned as a coordinator
};

class ProcessSet {
 public:
  ProcessSet(int id, std::vector<int> ranks, Transport& transport, TrafficCounters& traffic, const SetOptions& options);

  // Called when this rank leaves the world. Keeps its block for peers that have yet to map it, and its staging memory,
  // which they may still read.
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
  // True once the block of each node peer is mapped or known to be gone.
  bool ready() const { return unconnected_.empty(); }
  const std::set<int>& unconnected() const { return unconnected_; }

  // Numbers the next operation, and returns its participants. `members`: their indices in `ranks`, from the decision.
  // Null if this rank is not one of them.
  std::unique_ptr<Participants> gather(const std::vector<int>& members);
  // Number of the last gathered operation; the same on all members.
  std::uint64_t sequence() const { return sequence_; }
  // World ranks of the members that share memory with this rank, but ended before it could map their blocks.
  std::vector<int> unmapped(const std::vector<int>& members) const;
  // Keeps the slot use of an ended operation for the next one, and remembers its submissions for repeats.
  void remember(Running& over);
  // Null until the blocks of all members of this node are mapped.
  OneShot* one_shot() { return one_shot_.get(); }
  void note_left(int index, const Departure& departure);
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
  std::map<std::uint64_t, PeerLost> given_up;  // by sequence(): given up by others before this rank began them
  NcclChannels channels;
  std::atomic<int> in_flight{0};  // operations between submit and finish
  // Counts of announced operations that have not ended: by name (name_of_repeats()), and of the joins among them.
  // Guarded by the scheduler's mutex.
  std::map<std::string, int, std::less<>> announced;
  int joins = 0;

  // A turn that this rank has entered.
  struct InTurn {
    std::shared_ptr<const Repeat> repeat;
    std::string name;  // of the submission; empty if a thread waits in the call (World::repeat)
    AwakeTime awaited_since;
    bool warned = false;
    Counted counted{};  // among the operations in two turns, if it is one
  };
  std::optional<InTurn> entered;
  std::optional<Time> awaited_since;  // when others, which have entered a turn, began to wait for this rank
  double timeout_s = 0;               // of its operations on this rank, in s; 0: the world's (SORDINO_TIMEOUT_S)
  // The last operation whose turn had no result. This rank announces it next time, as the other ranks do, instead of
  // entering another turn with it.
  std::shared_ptr<const Repeat> refused;
  bool take_refused(const std::shared_ptr<const Repeat>& repeat) {
    if (refused != repeat) return false;
    refused.reset();
    return true;
  }
  // Decisions wait while this rank is in a turn with an operation that needs a place in their order.
  bool holds_decisions() const { return entered && !entered->repeat->carried(); }

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
  bool crowded_ = false;              // a member of this node has patience 0; the same on all of these members
  std::set<int> unconnected_;         // node peers whose block locations have not arrived yet
  std::set<int> gone_;                // node peers whose blocks were gone before this rank could map them
  std::uint64_t sequence_ = 0;
  SlotUse slot_use_;
  ReceiveBuffer staging_;
  std::unique_ptr<OneShotSlots> own_slots_;  // used if no other member shares memory with this rank
  std::unique_ptr<OneShot> one_shot_;
  // Messages for one_shot_ that arrived before it existed: other nodes do not wait for the blocks of this node.
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

// A removed set. Peers that have yet to remove it read the slots in its block. Devices may still write words to the
// blocks of their peers, which the driver has pinned. So each rank's block stays until all peers have released it. If a
// peer has left without releasing it, the block stays to the end: that peer's World object, with its devices, may live
// longer.
struct RemovedSet {
  int id;
  std::shared_ptr<ProcessSet> set;      // until this rank's devices have finished; then null
  std::weak_ptr<QueueBarrier> barrier;  // a waiting thread may still use it
  std::shared_ptr<Segment> block;
  std::vector<int> peers;  // members on this node
  bool told = false;       // the peers know that this rank no longer uses their blocks
};

}  // namespace sordino
