// Collectives within a node, one after the other and mixed, with one rank always a step behind. No rank overwrites data
// that another has yet to read, and none returns shared memory too early.
#include "check.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr std::size_t kChunk = 4096 / sizeof(float);

float value(int rank, std::size_t operation, std::size_t place) {
  return static_cast<float>(place % 997 + 1000 * operation + 100'000 * static_cast<std::size_t>(rank));
}

// A tensor of each rank, in ordinary or in shared memory.
struct Memory {
  Memory(Engine& engine, std::size_t count, bool shared)
      : own(shared ? 0 : count),
        segment(shared ? engine.transport->node_memory().allocate(count * sizeof(float)) : nullptr) {}
  float* data() { return segment ? reinterpret_cast<float*>(segment->data) : own.data(); }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(data()); }

  std::vector<float> own;
  std::shared_ptr<Segment> segment;
};

void what_is_behind_is_not_overwritten(int slow, std::size_t chunks, bool shared) {
  constexpr int kRanks = 3;
  Config config = Config::from_environment();
  config.chunk_bytes = kChunk * sizeof(float);
  Engines ranks({0, 0, 0}, config);
  constexpr Opcode kKinds[] = {Opcode::kAllgather, Opcode::kBroadcast,     Opcode::kAlltoall, Opcode::kAllreduce,
                               Opcode::kBroadcast, Opcode::kReducescatter, Opcode::kAlltoall, Opcode::kReducescatter,
                               Opcode::kAllgather, Opcode::kAllgather};
  // Ranks pass different numbers of rows to an all-gather and to an all-to-all.
  const auto rows = [&](Opcode kind, int rank) {
    const bool differ = kind == Opcode::kAllgather || kind == Opcode::kAlltoall;
    return chunks * kChunk + 100 + (differ ? 10 * static_cast<std::size_t>(rank) : 0);
  };
  // First row that a rank gives to another one in an all-to-all. All ranks give more rows to later ones.
  const auto begin = [&](int rank, int to) {
    return to == kRanks ? rows(Opcode::kAlltoall, rank)
                        : rows(Opcode::kAlltoall, rank) * static_cast<std::size_t>(to * to) / 10;
  };
  // First row that a rank gets in a reduce-scatter. The first ranks get one row more.
  const auto scattered = [&](int rank) {
    const std::size_t all = rows(Opcode::kReducescatter, rank), place = static_cast<std::size_t>(rank);
    return all / kRanks * place + std::min(place, all % kRanks);
  };
  std::vector<std::vector<Memory>> inputs(kRanks);
  std::vector<std::vector<std::shared_ptr<Handle>>> handles(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    for (std::size_t operation = 0; operation < std::size(kKinds); ++operation) {
      const Opcode kind = kKinds[operation];
      const std::size_t count = rows(kind, rank);
      Memory& memory = inputs[rank].emplace_back(ranks[rank], count, shared);
      for (std::size_t place = 0; place < count; ++place) memory.data()[place] = value(rank, operation, place);
      Request request;
      request.name = std::to_string(operation);
      request.opcode = kind;
      request.op = ReduceOp::kMax;
      request.root = static_cast<int>(operation % kRanks);
      const bool in_place = kind == Opcode::kAllreduce || kind == Opcode::kBroadcast;
      request.tensors.push_back(
          {DType::kFloat32, {static_cast<std::int64_t>(count)}, memory.bytes(), in_place ? memory.bytes() : nullptr});
      for (int to = 0; kind == Opcode::kAlltoall && to < kRanks; ++to)
        request.splits.push_back(static_cast<std::int64_t>(begin(rank, to + 1) - begin(rank, to)));
      handles[rank].push_back(ranks[rank].scheduler.submit(std::move(request)));
    }
  }
  // Once an operation is over on a rank, its caller may change the input.
  std::vector<std::size_t> over(kRanks);
  std::size_t wrong = 0;
  const auto look = [&](int rank) {
    ranks[rank].poll();
    for (std::size_t& next = over[rank]; next < std::size(kKinds) && handles[rank][next]->done(); ++next) {
      const Opcode kind = kKinds[next];
      const Handle& handle = *handles[rank][next];
      CHECK(!handle.error);
      const auto* result =
          handle.results.empty() ? nullptr : reinterpret_cast<const float*>(handle.results[0].data.get());
      if (kind == Opcode::kAllgather) {
        for (int from = 0; from < kRanks; ++from) {
          for (std::size_t place = 0; place < rows(kind, from); ++place) wrong += *result++ != value(from, next, place);
        }
      } else if (kind == Opcode::kAlltoall) {
        for (int from = 0; from < kRanks; ++from) {
          for (std::size_t place = begin(from, rank); place < begin(from, rank + 1); ++place)
            wrong += *result++ != value(from, next, place);
        }
      } else if (kind == Opcode::kReducescatter) {
        for (std::size_t place = scattered(rank); place < scattered(rank + 1); ++place)
          wrong += *result++ != value(kRanks - 1, next, place);
      } else {
        const int from = kind == Opcode::kBroadcast ? static_cast<int>(next % kRanks) : kRanks - 1;
        for (std::size_t place = 0; place < rows(kind, rank); ++place)
          wrong += inputs[rank][next].data()[place] != value(from, next, place);
      }
      std::fill_n(inputs[rank][next].data(), rows(kind, rank), -1.0f);
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
  std::vector<Memory> tensors;
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < kRanks; ++rank) {
    Memory& memory = tensors.emplace_back(ranks[rank], kCount, true);
    Request request;
    request.name = "given up";
    request.opcode = Opcode::kBroadcast;
    request.tensors.push_back({DType::kFloat32, {static_cast<std::int64_t>(kCount)}, memory.bytes(), memory.bytes()});
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
