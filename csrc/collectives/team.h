// The participants of one running operation: who they are, how to reach them, and what they wait for.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/compute.h"
#include "progress/task.h"
#include "transport/transport.h"

namespace sordino {

namespace nccl {
class Channel;
}

// What one rank lays out for the node peers of a process set, in memory that they map. The counters hold
// (sequence of the operation, stage within it), so they only grow and a late reader never mistakes one for another.
struct alignas(64) Desk {
  alignas(64) std::atomic<std::uint64_t> offered;   // inputs up to this stage may be read
  alignas(64) std::atomic<std::uint64_t> reduced;   // results up to this stage may be read
  alignas(64) std::atomic<std::uint64_t> finished;  // this rank reads nothing of its peers up to this stage any more
  alignas(64) Location location;                    // where the operation's tensor lies, if in shared memory
  Location result, inbox;                           // of an exchange: where its result goes, what other nodes sent
  bool reaches_devices;                             // whether this rank could map all others' device memory
  static constexpr std::size_t kStaging = 4096;     // offset of the staging slots
  static constexpr int kSlots = 4;

  static std::size_t bytes_for(std::size_t chunk) { return kStaging + kSlots * chunk; }
  std::byte* slot(std::uint64_t number, std::size_t chunk) {
    return reinterpret_cast<std::byte*>(this) + kStaging + number % kSlots * chunk;
  }
};

// Bytes that this rank has sent, by who gets them.
struct Traffic {
  std::atomic<std::uint64_t> inside{0}, across{0};  // the node
  std::atomic<std::uint64_t> operations{0};
};

class Team {
 public:
  Team(Transport& transport, Traffic& traffic, std::vector<int> ranks, int me, int set_size, std::uint64_t sequence,
       Tag tag)
      : transport(transport),
        traffic(traffic),
        ranks(std::move(ranks)),
        me(me),
        set_size(set_size),
        sequence(sequence),
        tag(tag) {}

  int size() const { return static_cast<int>(ranks.size()); }

  std::unique_ptr<Transfer> send(int index, std::span<const std::byte> data) {
    count_sent(index, data.size());
    return transport.send(ranks[static_cast<std::size_t>(index)], tag, data);
  }
  std::unique_ptr<Transfer> receive(int index, std::span<std::byte> data) {
    return transport.receive(ranks[static_cast<std::size_t>(index)], tag, data);
  }
  // Sends to one participant while receiving from another (or the same).
  Task exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in);
  Task finished(Transfer& transfer, int index);

  // Waits until `counter` of every other desk has reached (sequence, stage).
  Task all_reached(std::atomic<std::uint64_t> Desk::* counter, std::uint64_t stage);
  // Sets this rank's own counter and wakes those who wait for it.
  void reach(std::atomic<std::uint64_t> Desk::* counter, std::uint64_t stage);

  std::uint64_t stamp(std::uint64_t stage) const { return sequence << kStageBits | (stages_used + stage); }
  void count_sent(int index, std::size_t bytes);
  // The queue of its device that its work is on.
  Stream stream() const;

  Transport& transport;
  Traffic& traffic;
  const std::vector<int> ranks;  // world ranks, in order
  const int me;                  // index into ranks
  const int set_size;            // members of the process set, joined ones too: what Average divides by
  const std::uint64_t sequence;
  const Tag tag;
  Compute* compute = &host_compute();    // whose memory the algorithm is given
  nccl::Channel* channel = nullptr;      // by which collectives go, if by NCCL
  std::optional<bool> shares_devices;    // whether all members map each other's device memory, once they have tried
  std::vector<Desk*> desks;              // by participant; null for those that share no memory with this rank
  bool one_node = false;                 // every participant has a desk here
  std::uint64_t stages_used = 0;         // by the parts of the operation that are over (one a dtype); the same on all
  std::size_t chunk = 0;                 // bytes of a staging slot
  bool dormant = false;                  // waits for another operation of this rank, which has a deadline of its own
  int patience = 0;                      // how often to look again at a peer's counter before doing something else
  std::uint64_t last_staged = 0;         // last stamp of the set's latest operation that used the slots
  std::vector<Desk*> last_staged_desks;  // and the desks of those who took part in it

  // World ranks that the operation waits for right now.
  std::vector<int> laggards() const { return waits_for_ ? waits_for_() : std::vector<int>{}; }

  static constexpr int kStageBits = 24;

 private:
  std::function<std::vector<int>()> waits_for_;
};

}  // namespace sordino
