// Barrier at which the devices of a node's ranks meet on their queues, while the ranks' threads continue. So a whole
// operation can be put on the queues before its inputs exist, and no thread waits for a GPU. In `told`, each rank has a
// word for every member of the set:
//
//   meet      my device: writes the stamp to told[me] of each peer
//             my device: waits until my told[peer] has reached the stamp, for each peer
//   abandon   my host, after a failure: sets my let_go, then stores kEnd in my told[] until the queue is empty
//
// Each word has one reader, so abandon() releases only this rank's device. Results of that device are invalid then, but
// may reach tensors of other ranks. So let_go is set first, and ranks check let_go() after a meeting.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "collectives/shared_block.h"
#include "device/device.h"

namespace sordino {

// Barrier of one process set, on queues of its own. On a shared queue, operations of several sets would wait for each
// other, in a different order on each rank.
class QueueBarrier {
 public:
  // `blocks` and world `ranks` are those of the set's members; `me` is this rank's place among them. The blocks must
  // stay mapped as long as this lives. Returns null if the device cannot wait for words, cannot reach them, or has no
  // waiting queue left.
  static std::unique_ptr<QueueBarrier> make(const std::shared_ptr<Device>& device, std::vector<SharedBlock*> blocks,
                                            std::vector<int> ranks, int me);
  // Waits for the work on the queues, at most 30 s: a device that takes longer hangs, and its words stay pinned.
  ~QueueBarrier();
  QueueBarrier(const QueueBarrier&) = delete;
  QueueBarrier& operator=(const QueueBarrier&) = delete;

  // Returns the device's queue for the next operation, which runs after all earlier ones, whichever device they use.
  // DeviceError if another device than make()'s has no waiting queue left.
  Stream take_queue(const std::shared_ptr<Device>& device);
  // Puts a meeting of the members (places, this rank's included) on that queue. Stamps must grow between meetings.
  void meet(std::span<const int> members, std::uint64_t stamp);
  // World ranks whose devices are furthest behind, if not all have reached the latest meeting. May include this rank.
  std::vector<int> late() const;
  // World ranks of the set that have called abandon(), this one included. From any thread, while the set exists.
  std::vector<int> let_go() const;
  // The set has failed: from now on, work on the queue waits for no peer.
  void abandon() noexcept;
  // Whether the queues are empty, or the device has failed. After a call, put nothing on them until the next operation.
  bool idle() noexcept;

 private:
  QueueBarrier(std::shared_ptr<Device> pinned_by, Stream queue, std::vector<SharedBlock*> blocks,
               std::vector<int> ranks, int me)
      : pinned_by_(std::move(pinned_by)),
        blocks_(std::move(blocks)),
        ranks_(std::move(ranks)),
        me_(me),
        queues_{{pinned_by_, queue}} {}
  std::atomic<std::uint64_t>& told_by(int member) const { return own().told[static_cast<std::size_t>(member)]; }
  std::uint64_t progress_of(int member) const;
  SharedBlock& own() const { return *blocks_[static_cast<std::size_t>(me_)]; }

  const std::shared_ptr<Device> pinned_by_;
  const std::vector<SharedBlock*> blocks_;
  const std::vector<int> ranks_;
  const int me_;
  std::vector<std::byte*> pinned_;
  std::map<std::shared_ptr<Device>, Stream> queues_;
  std::shared_ptr<Device> device_;  // of the latest operation; null before the first
  Stream queue_ = 0;
  std::shared_ptr<Event> end_;  // of the queue, once idle() has asked for it
  std::vector<int> awaited_;    // other members of the latest meeting
  std::uint64_t stamp_ = 0;     // of the latest meeting
  std::atomic<bool> stopping_{false};
  std::thread letting_go_;
};

}  // namespace sordino
