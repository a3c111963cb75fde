#include "collectives/shared_tensors.h"

#include <algorithm>

namespace sordino {

Task find_shared(Participants& participants, const Pieces& pieces, std::vector<std::byte*>& tensors) {
  NodeMemory& memory = participants.transport.node_memory();
  co_await slots_free(participants);
  const Piece* tensor = pieces.in_place();
  participants.blocks[static_cast<std::size_t>(participants.me)]->location =
      tensor ? memory.locate(tensor->input, pieces.bytes()) : Location{};
  participants.reach(&SharedBlock::offered, kOfferStage);
  co_await participants.all_reached(&SharedBlock::offered, kOfferStage);
  const bool all_shared = std::all_of(participants.blocks.begin(), participants.blocks.end(),
                                      [](const SharedBlock* block) { return !block || block->location.segment != 0; });
  if (!all_shared) co_return;
  for (std::size_t index = 0; index < participants.blocks.size(); ++index) {
    const SharedBlock* block = participants.blocks[index];
    if (!block) continue;
    tensors.push_back(static_cast<int>(index) == participants.me
                          ? tensor->output
                          : memory.map(participants.ranks[index], block->location, participants.compute->device()));
  }
  locations_read(participants, kOfferStage);
}

Task slots_free(Participants& participants) {
  const SlotUse& last = participants.slot_use;
  const auto reads = [&last](std::size_t index) {
    const SharedBlock* block = last.blocks[index];
    return block && block->finished.load(std::memory_order_acquire) < last.stamp;
  };
  const auto all_have_read = [&last, reads] {
    for (std::size_t index = 0; index < last.blocks.size(); ++index) {
      if (reads(index)) return false;
    }
    return true;
  };
  if (all_have_read()) co_return;
  const Participants::Waiting waiting(participants, [&last, reads] {
    std::set<int> missing;
    for (std::size_t index = 0; index < last.blocks.size(); ++index) {
      if (reads(index)) missing.insert(last.ranks[index]);
    }
    return missing;
  });
  co_await until(all_have_read);
}

Slots::Slots(const Participants& participants, std::size_t bytes)
    : blocks_(participants.blocks),
      // A slot, which a chunk may fill, need not be a multiple of a line.
      cell_(std::clamp((bytes + kLine - 1) / kLine * kLine, kLine, participants.slot_bytes)),
      cells_(SharedBlock::kSlots * participants.slot_bytes / cell_) {}

void Slots::take(Participants& participants, std::uint64_t chunks) {
  std::size_t& next = participants.slot_use.next;
  const std::uint64_t first = (next + cell_ - 1) / cell_ % cells_;
  const std::uint64_t end = std::min<std::uint64_t>(first + chunks, cells_);
  participants.own_block->reserve(SharedBlock::kSlotsBegin + end * cell_);
  blocks_[static_cast<std::size_t>(participants.me)]->first_cell = first;
  next = (first + chunks) % cells_ * cell_;
}

void slots_used(Participants& participants, std::uint64_t stage) {
  // Assigned member by member, so that the copy of the blocks reuses the memory of the last one.
  participants.slot_use.stamp = participants.stamp(stage);
  participants.slot_use.blocks = participants.blocks;
  participants.slot_use.ranks = participants.ranks;
}

void locations_read(Participants& participants, std::uint64_t stage) {
  if (!participants.barrier) return;
  participants.reach(&SharedBlock::finished, stage);
  slots_used(participants, stage);
}

Task take_staging(Participants& participants, std::size_t bytes, std::byte*& data) {
  co_await slots_free(participants);
  data = participants.staging->reserve(1, bytes, true, nullptr);
  participants.blocks[static_cast<std::size_t>(participants.me)]->buffer =
      participants.transport.node_memory().locate(data, bytes);
}

std::byte* staging_of(Participants& participants, int index) {
  if (index == participants.me) return participants.staging->data();
  const auto place = static_cast<std::size_t>(index);
  return participants.transport.node_memory().map(participants.ranks[place], participants.blocks[place]->buffer);
}

}  // namespace sordino
