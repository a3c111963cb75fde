// Averages through the slots of a node, one after the other, with one rank always a step behind. The next operation
// does not overwrite slots that this rank has yet to read.
#include "check.h"
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

}  // namespace

int main() {
  for (const int slow : {0, 1}) {
    for (std::size_t chunks = 2; chunks < 12; ++chunks) {
      for (const std::size_t rest : {std::size_t{100}, kChunk})
        the_next_operation_waits_for_its_slots(slow, chunks, rest);
    }
  }
  return report();
}
