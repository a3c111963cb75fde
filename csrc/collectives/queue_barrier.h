// How the devices of a node's ranks meet, while their threads go on: each writes into a word of every peer how far it
// is, and waits for what the peers' devices write into its own. So an operation is on the queues as a whole before its
// inputs are there, and no thread waits for a GPU.
//
// A word has one reader. So a rank that has failed can let its own device go, by words that say that everybody has come
// to the end. What its device does from then on is nothing, and may be written to tensors of others: so the rank says
// before that it has let go, and whoever has come to the end of a meeting with it looks (let_go()).
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

// Of one process set, on queues of its own: on one queue operations of several sets would wait for each other, in
// another order on each rank.
class QueueBarrier {
 public:
  // `blocks` and world `ranks` of the set's members, in memory that stays mapped as long as this lives; `me` is this
  // one's place. Null if the device cannot wait for words, or cannot reach them.
  static std::unique_ptr<QueueBarrier> make(const std::shared_ptr<Device>& device, std::vector<SharedBlock*> blocks,
                                            std::vector<int> ranks, int me);
  // Waits for what is on the queues.
  ~QueueBarrier();
  QueueBarrier(const QueueBarrier&) = delete;
  QueueBarrier& operator=(const QueueBarrier&) = delete;

  // The queue of a device for the next operation, which comes after all earlier ones on whatever device.
  Stream take_queue(const std::shared_ptr<Device>& device);
  // Puts on that queue that the members (places, this rank's among them) meet; stamps grow from one meeting to the
  // next.
  void meet(std::span<const int> members, std::uint64_t stamp);
  // World ranks whose devices are furthest behind, this one's among them, if not all have come to the latest meeting.
  std::vector<int> late() const;
  // World ranks of the set that have let go, this one's among them. From any thread, while the set is there.
  std::vector<int> let_go() const;
  // The set has failed: from now on what is on the queue waits for nobody.
  void abandon() noexcept;
  // Whether the queues have nothing left, or the device has failed. Nothing is put on them from the first call until
  // the next operation.
  bool idle() noexcept;

 private:
  QueueBarrier(std::shared_ptr<Device> pinned_by, std::vector<SharedBlock*> blocks, std::vector<int> ranks, int me)
      : pinned_by_(std::move(pinned_by)), blocks_(std::move(blocks)), ranks_(std::move(ranks)), me_(me) {}
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
  std::shared_ptr<Event> end_;  // of it, once asked for
  std::vector<int> awaited_;    // members, at the latest meeting
  std::uint64_t stamp_ = 0;     // of that
  std::atomic<bool> stopping_{false};
  std::thread letting_go_;
};

}  // namespace sordino
