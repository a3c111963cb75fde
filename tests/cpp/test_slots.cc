// Averages through the slots of a node, one after the other, with one rank always a step behind. The next operation
// does not overwrite slots that this rank has yet to read.
#include "check.h"
#include "collectives/shared_tensors.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr std::size_t kChunk = 4096 / sizeof(float);

void the_next_operation_waits_for_its_slots(int slow, std::size_t chunks, std::size_t rest) {
  Config config = Config::from_environment();
  config.chunk_bytes = kChunk * sizeof(float);
  config.fusion_bytes = 0;
  Engines ranks({0, 0}, config);
  // The last chunk is short, so the shards of the next operation are at other offsets of its slot.
  const std::size_t sizes[] = {(chunks - 1) * kChunk + rest, 3 * kChunk, 2 * kChunk};
  std::vector<std::vector<float>> values[2];
  std::vector<std::shared_ptr<Handle>> handles;
  for (const int rank : {0, 1}) {
    for (const std::size_t size : sizes) {
      auto& mine = values[rank].emplace_back(size);
      for (std::size_t place = 0; place < size; ++place)
        mine[place] = static_cast<float>(place % 1000) + 1000.0f * static_cast<float>(rank + values[rank].size());
    }
  }
  for (const int rank : {0, 1}) {
    for (std::size_t operation = 0; operation < std::size(sizes); ++operation)
      handles.push_back(ranks[rank].scheduler.submit(allreduce_of(std::to_string(operation), values[rank][operation])));
  }
  for (int turn = 0; turn < 500; ++turn) {  // each rank goes as far as it can, one of them into the next operation
    ranks[slow].poll();
    for (int times = 0; times < 4; ++times) ranks[1 - slow].poll();
  }
  for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
  for (const int rank : {0, 1}) {
    for (std::size_t operation = 0; operation < std::size(sizes); ++operation) {
      std::size_t wrong = 0;
      for (std::size_t place = 0; place < sizes[operation]; ++place) {
        const auto expected = 2 * static_cast<float>(place % 1000) + 1000.0f * static_cast<float>(2 * operation + 3);
        wrong += values[rank][operation][place] != expected;
      }
      CHECK(wrong == 0, "rank", rank, "operation", operation, "chunks", chunks, "slow", slow, "wrong", wrong);
    }
  }
}

// An operation begins behind the cells of the last one, and each rank finds the cells of its peers.
void chunks_move_on() {
  constexpr std::size_t kSlot = 4096;
  Config config = Config::from_environment();
  config.chunk_bytes = kSlot;
  Engines ranks({0, 0}, config);
  Transport& transport = *ranks[0].transport;
  std::vector<std::shared_ptr<Segment>> segments;
  Participants participants(transport, ranks[0].common.traffic, {0, 1}, 0, 2, 1, 0);
  for (int rank = 0; rank < 2; ++rank) {
    segments.push_back(transport.node_memory().allocate(SharedBlock::bytes_for(kSlot)));
    participants.blocks.push_back(reinterpret_cast<SharedBlock*>(segments.back()->data));
  }
  participants.own_block = segments[0].get();
  participants.slot_bytes = kSlot;
  const auto place = [&](const Slots& slots, std::size_t rank, std::uint64_t chunk) {
    return static_cast<std::size_t>(slots.at(rank, chunk) - participants.blocks[rank]->slots());
  };
  Slots slots(participants, 1000);
  for (std::size_t operation = 0; operation < 40; ++operation) {
    slots.take(participants, 1);
    CHECK(place(slots, 0, 0) == operation % 16 * 1024, "operation", operation);
    CHECK(place(slots, 1, 0) == 0, "operation", operation);  // rank 1 has taken none
  }
  Slots larger(participants, 3000);  // after 8 of 16 cells of 1024 bytes
  larger.take(participants, 9);
  for (std::uint64_t chunk = 0; chunk < 9; ++chunk) CHECK(place(larger, 0, chunk) == (chunk + 3) % 5 * 3008);
  Slots whole(participants, kSlot);
  whole.take(participants, 4);
  CHECK(place(whole, 0, 0) == 2 * kSlot && place(whole, 0, 3) == kSlot);
  participants.blocks[1]->first_cell = 3;
  CHECK(place(whole, 1, 0) == 3 * kSlot);
}

}  // namespace

int main() {
  chunks_move_on();
  for (const int slow : {0, 1}) {
    for (std::size_t chunks = 2; chunks < 12; ++chunks) {
      for (const std::size_t rest : {std::size_t{100}, kChunk})
        the_next_operation_waits_for_its_slots(slow, chunks, rest);
    }
  }
  return report();
}
