// A process set: some ranks of the world, with an order of operations of their own.
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

// Blocking all-reduces are submitted under this and their name; those without one are numbered.
inline constexpr const char* kAllreduceLabel = "allreduce.";
inline constexpr std::string_view kUnnamed = "noname.";

// How the sets of a world are set up.
struct SetOptions {
  std::size_t slot_bytes;  // 0 when the ranks of a node do not share memory
  int patience;            // of Participants
  std::size_t fusion_bytes;
  std::shared_ptr<GivenIds> given;  // by this rank, where it coordinates
};

class ProcessSet {
 public:
  ProcessSet(int id, std::vector<int> ranks, Transport& transport, Traffic& traffic, const SetOptions& options);

  // This rank leaves the world: its block stays for peers that have yet to map it, and what they may still read.
  void leave_block() {
    for (auto segment : {std::move(own_block_), staging_.segment()}) {
      if (segment) transport_.keep(std::move(segment));
    }
  }
  // Where this rank's block is, for the node peers; segment 0 when there is none.
  Location block_location() const;
  std::vector<int> node_peers() const;
  // Maps the block of a node peer. Throws TransportError if the location is wrong, if the peer has sent one before, or
  // if this process may map no more memory. A peer that has ended meanwhile is no error.
  void connect(int rank, const Location& block);
  // All blocks that this rank will ever see are there.
  bool ready() const { return unconnected_.empty(); }

  // Those that a decision names, for the next operation; null if this rank is none of them.
  std::unique_ptr<Participants> gather(const std::vector<int>& members);
  // Number of the last operation that was gathered; the same on all members.
  std::uint64_t sequence() const { return sequence_; }
  // World ranks of the members that share memory with this rank and had ended before it could map theirs.
  std::vector<int> unmapped(const std::vector<int>& members) const;
  // What an operation that is over leaves to the next, and what is to be remembered of it.
  void remember(Running& over);
  // Null until all members of this node have said where their blocks are.
  OneShot* one_shot() { return one_shot_.get(); }
  // A member has left the world.
  void leave(int index, const std::string& departed) {
    if (negotiation) negotiation->leave(index, departed);
    if (one_shot_) one_shot_->leave(index);
  }

  int index_of(int rank) const {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  }
  int coordinator() const { return ranks.front(); }

  const int id;
  const std::vector<int> ranks;
  const int me;                            // index of this rank, -1 for non-members
  std::optional<Negotiation> negotiation;  // on the coordinator
  std::deque<Decision> decisions;          // not begun yet
  std::set<std::string> stalled;           // undecided names whose missing ranks the coordinator has reported
  std::optional<Running> running;
  std::map<std::uint64_t, PeerLost> given_up;  // by members, before this rank has begun them; by Participants::sequence
  NcclChannels channels;
  std::atomic<int> in_flight{0};  // operations between submit and finish

  // What this rank has laid and others have not yet, or the other way round.
  struct InOneShot {
    std::string_view name;
    Time since;
    AwakeTime awaited_since;
    bool warned = false;
  };
  std::optional<InOneShot> laid;
  std::optional<Time> awaited_since;

 private:
  void open_one_shot();
  void send_partial(int member, const OneShot::Partial& what, std::span<const std::byte> data);

  Transport& transport_;
  Traffic& traffic_;
  const SetOptions options_;
  std::shared_ptr<Segment> own_block_;
  std::vector<SharedBlock*> blocks_;  // by member; null for members of other nodes
  std::set<int> unconnected_;         // node peers that have not said where their blocks are
  std::set<int> gone_;                // node peers whose blocks were gone when this rank was to map them
  std::uint64_t sequence_ = 0;
  SlotUse slot_use_;
  ReceiveBuffer staging_;
  std::unique_ptr<OneShotSlots> own_slots_;  // where this rank shares no memory
  std::unique_ptr<OneShot> one_shot_;

 public:
  SharedDevices devices;  // goes first, for its words are in the blocks
};

}  // namespace sordino
