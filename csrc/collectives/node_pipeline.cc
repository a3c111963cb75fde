#include "collectives/node_pipeline.h"

#include <algorithm>
#include <optional>

#include "collectives/shared_tensors.h"
#include "kernels/publish.h"

namespace sordino {
namespace {

constexpr std::size_t kLeastChunk = 32 * 1024;  // in bytes of all lanes; shorter ones cost more in waits
// A giver that takes chunk k has filled chunk k + kAhead - 1, so all ranks have taken chunk k - 2. Peers may be one
// chunk behind.
constexpr std::uint64_t kAhead = SharedBlock::kSlots - 1;

std::uint64_t stage(std::uint64_t chunk) { return kOfferStage + 1 + chunk; }

class NodePipeline {
 public:
  NodePipeline(Participants& participants, NodeMove& move)
      : participants_(participants), move_(move), lanes_(move.parts.front().size()), sources_(move.parts.size()) {
    std::size_t givers = 0;
    for (const auto& parts : move.parts) {
      std::size_t most = 0;
      for (const Part& part : parts) most = std::max(most, part.bytes);
      givers += most > 0;
      most_ = std::max(most_, most);
    }
    const std::size_t room = participants.slot_bytes / lanes_ / kLine * kLine;
    // A single giver needs several chunks, to fill one while others take another. If all give, all have work anyway.
    const std::size_t least_chunks = givers == 1 ? SharedBlock::kSlots : 2;
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
    move_.take(chunk * chunk_, sources_);
    participants_.reach(&SharedBlock::finished, stage(chunk));
  }

  void take_whole(const std::vector<const std::byte*>& inputs) {
    for (int peer = 0; peer < participants_.size(); ++peer) {
      const auto [begin, bytes] = part_for_me(peer);
      sources_[static_cast<std::size_t>(peer)] = {inputs[static_cast<std::size_t>(peer)] + begin, bytes};
    }
    move_.take(0, sources_);
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

// Offers the location of this rank's input, and finds the inputs of all participants that give data. `inputs` stays
// empty, on all ranks, if one is not in shared memory.
Task find_inputs(Participants& participants, const NodeMove& move, const NodePipeline& pipeline,
                 std::vector<const std::byte*>& inputs) {
  NodeMemory& memory = participants.transport.node_memory();
  const auto me = static_cast<std::size_t>(participants.me);
  SharedBlock& own = *participants.blocks[me];
  const std::size_t bytes = pipeline.input_bytes(participants.me);
  own.location = bytes > 0 ? memory.locate(move.input, bytes) : Location{};
  participants.reach(&SharedBlock::offered, kOfferStage);
  co_await offered(participants, pipeline, kOfferStage);
  std::vector<const std::byte*> found(participants.ranks.size());
  for (int peer = 0; peer < participants.size(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    if (!pipeline.gives(peer)) continue;
    const Location& location = participants.blocks[index]->location;
    if (location.segment == 0) co_return;
    found[index] = index == me ? move.input : memory.map(participants.ranks[index], location);
  }
  inputs = std::move(found);
}

}  // namespace

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
  std::vector<const std::byte*> inputs;
  if (pipeline.largest_part() >= kLeastInPlace) co_await find_inputs(participants, move, pipeline, inputs);
  if (!inputs.empty()) {
    pipeline.take_whole(inputs);
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
