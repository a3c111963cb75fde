// The participants of one running operation: who they are, how to reach them, and what they wait for.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "collectives/compute.h"
#include "collectives/queue_barrier.h"
#include "collectives/receive_buffer.h"
#include "collectives/shared_block.h"
#include "progress/task.h"
#include "transport/traffic.h"
#include "transport/transport.h"

namespace sordino {

namespace nccl {
class Channel;
}

// The latest operation that used the slots: its last stamp, and the blocks of those who took part in it.
struct SlotUse {
  std::uint64_t stamp = 0;
  std::vector<SharedBlock*> blocks;
  std::vector<int> ranks;
};

class Participants {
 public:
  Participants(Transport& transport, Traffic& traffic, std::vector<int> ranks, int me, int set_size,
               std::uint64_t sequence, Tag tag)
      : transport(transport),
        traffic(traffic),
        ranks(std::move(ranks)),
        me(me),
        set_size(set_size),
        sequence(sequence),
        tag(tag) {}

  int size() const { return static_cast<int>(ranks.size()); }

  // Messages between two participants keep their order within a lane; tasks side by side have a lane each.
  std::unique_ptr<Transfer> send(int index, std::span<const std::byte> data, Tag lane = 0) {
    count_sent(index, data.size());
    return transport.send(ranks[static_cast<std::size_t>(index)], tag | lane, data);
  }
  std::unique_ptr<Transfer> receive(int index, std::span<std::byte> data, Tag lane = 0) {
    return transport.receive(ranks[static_cast<std::size_t>(index)], tag | lane, data);
  }
  // Sends to one participant while receiving from another (or the same).
  Task exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in, Tag lane = 0);
  Task finished(Transfer& transfer, int index);

  // Waits until `counter` of every other block has reached (sequence, stage).
  Task all_reached(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // Sets this rank's own counter and wakes those who wait for it.
  void reach(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // Both: what comes next comes after what every participant did before. Where devices meet, so does what comes next on
  // the queue, and nobody waits here.
  Task meet(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // The same for the devices alone, where a counter has said where the inputs are, and not that they are there.
  void meet_inputs(std::uint64_t stage) {
    if (barrier) barrier->meet(members, stamp(stage));
  }

  std::uint64_t stamp(std::uint64_t stage) const { return sequence << kStageBits | (stages_used + stage); }
  void count_sent(int index, std::size_t bytes) {
    traffic.count(transport, ranks[static_cast<std::size_t>(index)], bytes);
  }

  Transport& transport;
  Traffic& traffic;
  const std::vector<int> ranks;  // world ranks, in order
  const int me;                  // index into ranks
  const int set_size;            // members of the process set, joined ones too: what Average divides by
  const std::uint64_t sequence;
  const Tag tag;
  Compute* compute = &host_compute();  // whose memory the algorithm is given
  nccl::Channel* channel = nullptr;    // by which collectives go, if by NCCL
  QueueBarrier* barrier = nullptr;     // by which the devices meet, where they do
  std::vector<int> members;            // by participant, its place in the process set
  std::vector<SharedBlock*> blocks;    // by participant; null for those that share no memory with this rank
  bool one_node = false;               // every participant has a block here
  std::uint64_t stages_used = 0;       // by the parts of the operation that are over (one a dtype); the same on all
  std::size_t slot_bytes = 0;
  int patience = 0;                  // how often to look again at a peer's counter before doing something else
  SlotUse slot_use;                  // of the set, before this operation and then by it
  ReceiveBuffer* staging = nullptr;  // of the set, for what is to lie in memory that the node maps

  // World ranks that the operation waits for right now.
  std::vector<int> laggards() const {
    std::set<int> late;
    for (const Waiting* one : waiting_) late.merge(one->who());
    return {late.begin(), late.end()};
  }

  static constexpr int kStageBits = 24;

  // That a task of the operation waits, as long as this lives.
  class Waiting {
   public:
    Waiting(Participants& participants, std::function<std::set<int>()> who)
        : who(std::move(who)), participants_(participants) {
      participants_.waiting_.insert(this);
    }
    Waiting(const Waiting&) = delete;
    ~Waiting() { participants_.waiting_.erase(this); }

    const std::function<std::set<int>()> who;

   private:
    Participants& participants_;
  };

 private:
  std::set<const Waiting*> waiting_;
};

}  // namespace sordino
