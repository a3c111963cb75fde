// Collectives within a node, one after the other and mixed, with one rank always a step behind. No rank overwrites data
// that another has yet to read, and none returns shared memory too early.
#include "check.h"
#include "node_moves.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr std::size_t kChunk = 4096 / sizeof(float);

void what_is_behind_is_not_overwritten(int slow, std::size_t chunks, bool shared) {
  constexpr int kRanks = 3;
  Config config = Config::from_environment();
  config.chunk_bytes = kChunk * sizeof(float);
  Engines ranks({0, 0, 0}, config);
  constexpr Opcode kKinds[] = {Opcode::kAllgather, Opcode::kBroadcast,     Opcode::kAlltoall, Opcode::kAllreduce,
                               Opcode::kBroadcast, Opcode::kReducescatter, Opcode::kAlltoall, Opcode::kReducescatter,
                               Opcode::kAllgather, Opcode::kAllgather};
  const NodeMoves moves{kRanks, chunks * kChunk + 100};
  std::vector<std::vector<Vector>> vectors(kRanks);
  std::vector<std::vector<std::shared_ptr<Handle>>> handles(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::size_t operation = 0; operation < std::size(kKinds); ++operation) {
      const Opcode kind = kKinds[operation];
      Vector& vector = vectors[rank].emplace_back(ranks[rank], moves.rows(kind, rank), shared);
      Request request = moves.request(kind, rank, operation, vector);
      request.name = std::to_string(operation);
      handles[rank].push_back(ranks[rank].scheduler.submit(std::move(request)));
    }
  }
  // Once an operation is over on a rank, its caller may change the input.
  std::vector<std::size_t> over(kRanks);
  std::size_t wrong = 0;
  const auto look = [&](int rank) {
    ranks[rank].poll();
    for (std::size_t& next = over[rank]; next < std::size(kKinds) && handles[rank][next]->done(); ++next) {
      CHECK(!handles[rank][next]->error);
      Vector& vector = vectors[rank][next];
      wrong += moves.wrong(kKinds[next], rank, next, vector, *handles[rank][next]);
      std::fill_n(vector.data(), vector.count, -1.0f);
    }
  };
  for (int turn = 0; turn < 1000; ++turn) {
    look(slow);
    for (int times = 0; times < 4; ++times) {
      for (int rank = 0; rank < kRanks; ++rank) {
        if (rank != slow) look(rank);
      }
    }
  }
  for (int rank = 0; rank < kRanks; ++rank) CHECK(over[rank] == std::size(kKinds), "rank", rank, "slow", slow);
  CHECK(wrong == 0, "slow", slow, "chunks", chunks, "shared", shared, "wrong", wrong);
}

// The root gives up a broadcast after it has offered its tensor, and its caller changes the tensor. The others must not
// take the changed values for those of the broadcast.
void what_a_rank_gave_up_is_not_taken() {
  constexpr int kRanks = 3;
  constexpr std::size_t kCount = 20'000;
  Engines ranks({0, 0, 0}, Config::from_environment());
  std::vector<Vector> tensors;
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < kRanks; ++rank) {
    Request request =
        request_of(Opcode::kBroadcast, tensors.emplace_back(ranks[rank], kCount, true), /*in_place=*/true);
    request.name = "given up";
    handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
  }
  for (const int rank : {1, 2}) ranks[rank].poll();
  for (int turn = 0; turn < 5; ++turn) ranks[0].poll();  // decides and offers
  CHECK(!handles[0]->done());
  ranks[0].scheduler.end(std::make_exception_ptr(Error("another operation has failed")), true);
  CHECK(handles[0]->done() && handles[0]->error);
  for (int turn = 0; turn < 5; ++turn) {
    for (const int rank : {1, 2}) ranks[rank].poll();
  }
  for (const int rank : {1, 2}) {
    CHECK(!handles[rank]->done(), "rank", rank);
    ranks[rank].scheduler.end(std::make_exception_ptr(Error("rank 0 has failed")), true);
    CHECK(handles[rank]->done() && handles[rank]->error);
  }
}

}  // namespace

int main() {
  what_a_rank_gave_up_is_not_taken();
  for (int slow = 0; slow < 3; ++slow) {
    for (std::size_t chunks = 0; chunks < 14; ++chunks) {
      for (const bool shared : {false, true}) what_is_behind_is_not_overwritten(slow, chunks, shared);
    }
  }
  return report();
}
