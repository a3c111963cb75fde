// Participants of one running operation: their ranks, how to reach them, and the ranks that it waits for.
#pragma once

#include <atomic>
#include <exception>
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

// The latest operation that used the slots: its last stamp, and the blocks and ranks of its participants.
struct SlotUse {
  std::uint64_t stamp = 0;
  std::size_t next = 0;  // end of the cells of this rank's latest chunks (Slots), in bytes
  std::vector<SharedBlock*> blocks;
  std::vector<int> ranks;
};

class Participants {
 public:
  Participants(Transport& transport, TrafficCounters& traffic, std::vector<int> ranks, int me, int set_size,
               std::uint64_t sequence, Tag tag)
      : transport(transport),
        traffic(traffic),
        ranks(std::move(ranks)),
        me(me),
        set_size(set_size),
        sequence(sequence),
        tag(tag) {}

  int size() const { return static_cast<int>(ranks.size()); }

  // Messages between two participants keep their order within a lane. Tasks that run side by side use a lane each.
  std::unique_ptr<Transfer> send(int index, std::span<const std::byte> data, Tag lane = 0);
  std::unique_ptr<Transfer> receive(int index, std::span<std::byte> data, Tag lane = 0);
  // Sends to one participant while receiving from another (or the same).
  Task exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in, Tag lane = 0);
  Task finished(Transfer& transfer, int index);

  // Waits until `counter` of every other block has reached (sequence, stage).
  Task all_reached(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // Waits for the counter of one participant.
  Task reached(int index, std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // Sets this rank's own counter, and rings the ranks that may wait for it.
  void reach(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // A barrier: reach(), then all_reached(). Whatever follows comes after everything that each participant did before.
  // If devices meet (`barrier`), this holds for the work on their queues, and no thread waits here.
  Task meet(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage);
  // Lets the devices meet before inputs are read: a counter has said where the inputs are, not that devices have
  // written them.
  void meet_inputs(std::uint64_t stage) {
    if (barrier) barrier->meet(members, stamp(stage));
  }

  // Tells peers that this rank's input may change from now on, although they may not have read it.
  void note_given_up() {
    if (SharedBlock* own = blocks[static_cast<std::size_t>(me)])
      own->given_up.store(sequence + 1, std::memory_order_release);
  }
  std::uint64_t stamp(std::uint64_t stage) const { return sequence << kStageBits | (stages_used + stage); }
  void count_sent(int index, std::size_t bytes) {
    traffic.count(transport, ranks[static_cast<std::size_t>(index)], bytes);
  }

  Transport& transport;
  TrafficCounters& traffic;
  const std::vector<int> ranks;  // world ranks, in order
  const int me;                  // index into ranks
  const int set_size;            // members of the process set, joined ones included; Average divides by it
  const std::uint64_t sequence;
  const Tag tag;
  Compute* compute = &host_compute();       // computes on the memory of the operation
  nccl::Channel* channel = nullptr;         // for collectives by NCCL; else null
  QueueBarrier* barrier = nullptr;          // at which the devices meet; null if they do not
  std::vector<int> members;                 // by participant: its place in the process set
  std::vector<SharedBlock*> blocks;         // by participant; null if it shares no memory with this rank
  Segment* own_block = nullptr;             // memory of this rank's block; null without one
  bool one_node = false;                    // every participant has a block in `blocks`
  bool direct = false, used_slots = false;  // they reached each other's memory; their data passed through slots
  std::uint64_t stages_used = 0;            // by finished parts of the operation (one per dtype); equal on all ranks
  std::size_t slot_bytes = 0;
  int patience = 0;                  // re-reads of a peer's counter before doing something else
  SlotUse slot_use;                  // of the set: by the previous operation, then by this one
  ReceiveBuffer* staging = nullptr;  // of the set: memory that the node maps
  // Set when a transfer could not begin, or failed, because of a lost rank. The task keeps waiting, because its memory
  // and its other transfers may be in use. Its caller throws this error.
  std::exception_ptr lost;

  // World ranks that the operation waits for right now.
  std::vector<int> laggards() const {
    std::set<int> late;
    for (const Waiting* one : waiting_) late.merge(one->who());
    return {late.begin(), late.end()};
  }

  static constexpr int kStageBits = 24;

  // Registers, as long as it lives, that a task of the operation waits. who() returns the world ranks that it waits
  // for.
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
