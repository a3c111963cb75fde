#include "collectives/node_pipeline.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "collectives/shared_tensors.h"
#include "kernels/publish.h"

namespace sordino {
namespace {

// Least size of parts that the kernel copies from private memory. Looking up the pages of smaller ones takes longer
// than a second copy.
constexpr std::size_t kLeastPrivate = 32 * 1024;
// Limit for a single giver. Above it slots are faster, because giver and taker share the work.
constexpr std::size_t kMostFromOne = 1024 * 1024;
constexpr std::size_t kLeastChunk = 32 * 1024;  // in bytes of all lanes; shorter ones cost more in waits
// A giver that takes chunk k has filled chunk k + kAhead - 1, so all ranks have taken chunk k - 2. Peers may be one
// chunk behind.
constexpr std::uint64_t kAhead = SharedBlock::kSlots - 1;

std::uint64_t stage(std::uint64_t chunk) { return kOfferStage + 1 + chunk; }

class NodePipeline {
 public:
  NodePipeline(Participants& participants, NodeMove& move)
      : participants_(participants), move_(move), lanes_(move.parts.front().size()), sources_(move.parts.size()) {
    for (std::size_t giver = 0; giver < move.parts.size(); ++giver) {
      std::size_t most = 0;  // for a peer
      for (std::size_t lane = 0; lane < lanes_; ++lane) {
        const std::size_t bytes = move.parts[giver][lane].bytes;
        most_ = std::max(most_, bytes);
        if (lanes_ == 1 || lane != giver) most = std::max(most, bytes);
      }
      givers_ += most > 0;
      most_for_peers_ = std::max(most_for_peers_, most);
    }
    const std::size_t room = participants.slot_bytes / lanes_ / kLine * kLine;
    // A single giver needs several chunks, to fill one while others take another. If all give, all have work anyway.
    const std::size_t least_chunks = givers_ == 1 ? SharedBlock::kSlots : 2;
    const std::size_t wanted = (most_ / least_chunks + kLine - 1) / kLine * kLine;
    chunk_ = std::clamp(wanted, std::min(std::max(kLeastChunk / lanes_ / kLine * kLine, kLine), room), room);
    slots_.emplace(participants, lanes_ * chunk_);
  }

  std::size_t largest_part() const { return most_; }  // in bytes
  std::uint64_t chunks() const { return std::max<std::uint64_t>((most_ + chunk_ - 1) / chunk_, 1); }
  void take_slots() { slots_->take(participants_, chunks()); }
  bool gives(int participant) const { return input_bytes(participant) > 0; }
  // The parts of an input are contiguous and in order.
  std::size_t input_bytes(int participant) const {
    const Part& last = parts_of(participant).back();
    return last.begin + last.bytes;
  }

  void fill(std::uint64_t chunk) {
    for (std::size_t lane = 0; lane < lanes_; ++lane) {
      if (lanes_ > 1 && lane == my_lane()) continue;
      const auto [begin, bytes] = cut(parts_of(participants_.me)[lane], chunk);
      if (bytes > 0) kernels::publish(slot_of(participants_.me, chunk) + lane * chunk_, move_.input + begin, bytes);
    }
    participants_.reach(&SharedBlock::offered, stage(chunk));
  }

  void take(std::uint64_t chunk) {
    for (int peer = 0; peer < participants_.size(); ++peer) {
      const auto [begin, bytes] = cut(part_for_me(peer), chunk);
      const std::byte* data =
          peer == participants_.me ? move_.input + begin : slot_of(peer, chunk) + my_lane() * chunk_;
      sources_[static_cast<std::size_t>(peer)] = {data, bytes};
    }
    if (move_.places.empty()) {
      move_.fold(chunk * chunk_, sources_);
    } else {
      for_each_giver([&](int peer, std::byte* place) {
        const Source& source = sources_[static_cast<std::size_t>(peer)];
        copy(place + chunk * chunk_, source);
      });
    }
    participants_.reach(&SharedBlock::finished, stage(chunk));
  }

  // Takes all parts from the inputs that the participants have offered.
  void take_whole() {
    NodeMemory& memory = participants_.transport.node_memory();
    if (!move_.places.empty())
      return for_each_giver([&](int peer, std::byte* place) {
        const auto [begin, bytes] = part_for_me(peer);
        if (peer != participants_.me) {
          memory.copy(participants_.ranks[static_cast<std::size_t>(peer)], input_of(peer, begin), {place, bytes});
        } else {
          copy(place, {move_.input + begin, bytes});
        }
      });
    for (int peer = 0; peer < participants_.size(); ++peer) {
      const auto [begin, bytes] = part_for_me(peer);
      const std::byte* data =
          peer == participants_.me || bytes == 0
              ? move_.input + begin
              : memory.map(participants_.ranks[static_cast<std::size_t>(peer)], input_of(peer, begin));
      sources_[static_cast<std::size_t>(peer)] = {data, bytes};
    }
    move_.fold(0, sources_);
  }

  // Location of this rank's input, for its peers.
  Location offer() const {
    NodeMemory& memory = participants_.transport.node_memory();
    const std::size_t bytes = input_bytes(participants_.me);
    if (bytes == 0) return {};
    const bool by_kernel =
        !move_.places.empty() && is_for_kernel(most_for_peers_, givers_, lanes_ > 1 || participants_.size() == 2);
    return by_kernel ? memory.offer(move_.input, bytes) : memory.locate(move_.input, bytes);
  }

  void count_sent() {
    const std::vector<Part>& parts = parts_of(participants_.me);
    for (int peer = 0; peer < participants_.size(); ++peer) {
      const std::size_t bytes = parts[lanes_ > 1 ? static_cast<std::size_t>(peer) : 0].bytes;
      if (peer != participants_.me && bytes > 0) participants_.count_sent(peer, bytes);
    }
  }

 private:
  using Part = NodeMove::Part;
  using Source = NodeMove::Source;

  // Each rank begins with itself, so that they do not all read the same memory.
  template <typename Take>
  void for_each_giver(const Take& take) const {
    const int size = participants_.size();
    for (int step = 0; step < size; ++step) {
      const int peer = (participants_.me + step) % size;
      if (part_for_me(peer).bytes > 0) take(peer, move_.places[static_cast<std::size_t>(peer)]);
    }
  }
  static void copy(std::byte* to, Source from) {
    if (!from.empty() && to != from.data()) std::memcpy(to, from.data(), from.size());
  }
  // Location of byte `at` of the input that a peer has offered.
  Location input_of(int peer, std::size_t at) const {
    Location place = participants_.blocks[static_cast<std::size_t>(peer)]->location;
    place.offset += at;
    return place;
  }

  const std::vector<Part>& parts_of(int participant) const {
    return move_.parts[static_cast<std::size_t>(participant)];
  }
  const Part& part_for_me(int peer) const { return parts_of(peer)[my_lane()]; }
  std::size_t my_lane() const { return lanes_ > 1 ? static_cast<std::size_t>(participants_.me) : 0; }
  Part cut(const Part& part, std::uint64_t chunk) const {
    const std::size_t done = std::min<std::size_t>(chunk * chunk_, part.bytes);
    return {part.begin + done, std::min(chunk_, part.bytes - done)};
  }
  std::byte* slot_of(int participant, std::uint64_t chunk) const {
    return slots_->at(static_cast<std::size_t>(participant), chunk);
  }

  Participants& participants_;
  NodeMove& move_;
  const std::size_t lanes_;
  int givers_ = 0;                    // participants with data for peers
  std::size_t most_for_peers_ = 0;    // bytes of the largest part for another participant
  std::size_t most_ = 0, chunk_ = 0;  // bytes of the largest part, and of a chunk of a part
  std::optional<Slots> slots_;
  std::vector<NodeMove::Source> sources_;
};

// Waits until `offered` has reached stage `at` on all peers that give data.
Task offered(Participants& participants, const NodePipeline& pipeline, std::uint64_t at) {
  for (int peer = 0; peer < participants.size(); ++peer) {
    if (peer != participants.me && pipeline.gives(peer)) co_await participants.reached(peer, &SharedBlock::offered, at);
  }
}

// Offers this rank's input, and learns whether all participants that give data have offered theirs. All ranks set
// `all_offered` to the same value.
Task offer_inputs(Participants& participants, const NodePipeline& pipeline, bool& all_offered) {
  participants.blocks[static_cast<std::size_t>(participants.me)]->location = pipeline.offer();
  participants.reach(&SharedBlock::offered, kOfferStage);
  co_await offered(participants, pipeline, kOfferStage);
  all_offered = true;
  for (int peer = 0; peer < participants.size(); ++peer) {
    if (pipeline.gives(peer) && participants.blocks[static_cast<std::size_t>(peer)]->location.segment == 0)
      all_offered = false;
  }
}

// Completes once what this rank has read is known to be what its peers gave. A peer that has given up the operation may
// have changed its input meanwhile. Then this rank waits for a stage of its own that it never reaches, until it hears
// of that. It cannot wait for the peer, whose counters go on with its next operation.
Task unchanged(Participants& participants, const NodePipeline& pipeline, std::uint64_t last) {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int peer = 0; peer < participants.size(); ++peer) {
    const SharedBlock& block = *participants.blocks[static_cast<std::size_t>(peer)];
    if (pipeline.gives(peer) && block.given_up.load(std::memory_order_acquire) > participants.sequence)
      co_await participants.reached(participants.me, &SharedBlock::finished, last + 1);
  }
}

}  // namespace

bool is_for_kernel(std::size_t most, int givers, bool taken_once) {
  return taken_once && most >= kLeastPrivate && (givers > 1 || most <= kMostFromOne);
}

bool moves_in_node(const Participants& participants, bool lanes) {
  const std::size_t size = participants.ranks.size();
  return participants.one_node && size > 1 && !participants.compute->device() &&
         (!lanes || size * kLine <= participants.slot_bytes);
}

Task move_in_node(Participants& participants, NodeMove move) {
  NodePipeline pipeline(participants, move);
  const std::uint64_t chunks = pipeline.chunks(), last = stage(chunks - 1);
  const bool gives = pipeline.gives(participants.me);
  co_await slots_free(participants);
  bool all_offered = false;
  if (pipeline.largest_part() >= kLeastInPlace) co_await offer_inputs(participants, pipeline, all_offered);
  if (all_offered) {
    participants.direct = true;
    pipeline.take_whole();
    co_await unchanged(participants, pipeline, last);
    participants.reach(&SharedBlock::finished, last);
    if (gives) co_await participants.all_reached(&SharedBlock::finished, last);  // peers read its input
  } else {
    if (gives) pipeline.take_slots();
    std::uint64_t filled = 0;
    for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
      for (; gives && filled < std::min(chunk + kAhead, chunks); ++filled) {
        if (filled >= SharedBlock::kSlots)
          co_await participants.all_reached(&SharedBlock::finished, stage(filled - SharedBlock::kSlots));
        pipeline.fill(filled);
      }
      co_await offered(participants, pipeline, stage(chunk));
      pipeline.take(chunk);
    }
  }
  pipeline.count_sent();
  slots_used(participants, last);
  participants.stages_used += last;
}

}  // namespace sordino
