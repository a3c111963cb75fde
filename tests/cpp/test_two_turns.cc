// Operations in two turns within a node, polled by hand: results, memory that ranks reuse, and ranks that leave, give
// up or are late.
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "engine/world.h"
#include "node_moves.h"
#include "wrapped.h"

using namespace sordino;
using namespace sordino::test;

namespace {

enum class Memory { kOrdinary, kShared, kOfTheFirstRankIsOrdinary, kCopiedByTheKernel };

// Memory of ranks in one process, which copy from each other's private memory as if the kernel did it.
class Copied : public NodeMemory {
 public:
  enum class Kernel { kCopies, kRefuses, kFindsNoProcess };
  static inline Kernel kernel = Kernel::kCopies;

  explicit Copied(NodeMemory& below) : NodeMemory(below), below_(below) {}
  std::shared_ptr<Segment> allocate(std::size_t bytes) override { return below_.allocate(bytes); }
  std::shared_ptr<Segment> allocate_sparse(std::size_t bytes, std::size_t reserved) override {
    return below_.allocate_sparse(bytes, reserved);
  }
  bool offers_private(const void*, std::size_t, Sure sure) const override {
    return sure == Sure::kNo || kernel != Kernel::kRefuses;
  }

 protected:
  std::byte* map_host(int rank, const Location& location) override { return below_.map(rank, location); }
  void unmap_host(int rank, std::uint64_t segment) override { below_.unmap(rank, segment); }
  void read_private(int rank, std::uint64_t address, std::span<std::byte> to) override {
    if (kernel == Kernel::kRefuses) throw NotCopied("the kernel refuses");
    if (kernel == Kernel::kFindsNoProcess) throw MemoryGone("no such process", rank);
    std::memcpy(to.data(), reinterpret_cast<const void*>(address), to.size());
  }

 private:
  NodeMemory& below_;
};

class WithCopies : public Wrapped {
 public:
  explicit WithCopies(std::unique_ptr<Transport> below) : Wrapped(std::move(below)), memory_(Wrapped::node_memory()) {}
  NodeMemory& node_memory() override { return memory_; }

 private:
  Copied memory_;
};

Engines engines(int size, bool with_copies, const Config& config = Config::from_environment()) {
  return Engines(std::vector<int>(static_cast<std::size_t>(size), 0), config,
                 [&](std::unique_ptr<Transport> own) -> std::unique_ptr<Transport> {
                   if (with_copies) return std::make_unique<WithCopies>(std::move(own));
                   return own;
                 });
}

Request allreduce_of(Vector& vector) {
  Request request = request_of(Opcode::kAllreduce, vector, true);
  request.name = "allreduce.x";
  return request;
}

std::uint64_t turns_of(Engines& ranks) { return ranks[0].common.traffic.one_shot.load(); }

constexpr Opcode kKinds[] = {Opcode::kAllgather, Opcode::kBroadcast, Opcode::kAlltoall, Opcode::kAllreduce,
                             Opcode::kReducescatter};

// The operations of one rank, one after the other. Once one is over, the rank overwrites its input.
class Loop {
 public:
  Loop(Engines& engines, int rank, std::size_t count, bool shared)
      : engine_(engines[rank]), moves_{engines.size(), count}, rank_(rank) {
    for (const Opcode kind : kKinds) vectors_.emplace_back(engine_, moves_.rows(kind, rank), shared);
  }

  std::size_t done() const { return done_; }
  std::size_t wrong() const { return wrong_; }

  void step(std::size_t operations) {
    const std::size_t place = done_ % std::size(kKinds);
    const Opcode kind = kKinds[place];
    Vector& vector = vectors_[place];
    if (!handle_ && done_ < operations) {
      Request request = moves_.request(kind, rank_, done_, vector);
      request.name =
          collective(kind).name + std::to_string(moves_.root(done_));  // each root has a broadcast of its own
      handle_ = engine_.scheduler.submit(std::move(request));
    }
    engine_.poll();
    if (!handle_ || !handle_->done()) return;
    CHECK(!handle_->error);
    wrong_ += moves_.wrong(kind, rank_, done_, vector, *handle_);
    std::fill_n(vector.data(), vector.count, -1.0f);
    handle_.reset();
    ++done_;
  }

 private:
  Engine& engine_;
  const NodeMoves moves_;
  const int rank_;
  std::vector<Vector> vectors_;
  std::shared_ptr<Handle> handle_;
  std::size_t done_ = 0, wrong_ = 0;
};

// One rank is always a step behind. All kinds of operations follow each other, each of them several times.
void results_are_right_and_inputs_may_change(int size, int slow, std::size_t count, Memory memory) {
  constexpr int kRounds = 4;
  const std::size_t operations = kRounds * static_cast<std::size_t>(size) * std::size(kKinds);
  Engines ranks = engines(size, memory == Memory::kCopiedByTheKernel);
  std::vector<Loop> loops;
  for (int rank = 0; rank < size; ++rank)
    loops.emplace_back(ranks, rank, count,
                       memory == Memory::kShared || (memory == Memory::kOfTheFirstRankIsOrdinary && rank > 0));
  for (std::size_t step = 0; step < 40 * operations && loops[static_cast<std::size_t>(slow)].done() < operations;
       ++step) {
    loops[static_cast<std::size_t>(slow)].step(operations);
    for (int times = 0; times < 4; ++times) {
      for (int rank = 0; rank < size; ++rank) {
        if (rank != slow) loops[static_cast<std::size_t>(rank)].step(operations);
      }
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    const Loop& loop = loops[static_cast<std::size_t>(rank)];
    CHECK(loop.done() == operations && loop.wrong() == 0, "rank", rank, "slow", slow, "count", count, "done",
          loop.done(), "wrong", loop.wrong());
  }
  // All repeats took turns only if all memory could be reached. An all-reduce did so in any case.
  const auto repeats = static_cast<std::uint64_t>((kRounds - 1) * size);
  const bool small = count * sizeof(float) <= OneShotSlots::kMostInShards;
  const std::uint64_t kinds = memory == Memory::kShared ? std::size(kKinds)
                              : memory == Memory::kCopiedByTheKernel && size == 2
                                  ? 3U + small  // between two ranks the kernel copies all but reductions
                                  : small;
  const std::uint64_t least = kinds * repeats;
  CHECK(turns_of(ranks) >= least, "turns", turns_of(ranks), "least", least, "count", count);
}

// Repeats have the same bits as the first run, whatever the reduction, the number of ranks and the size.
void repeats_have_the_same_bits(int size, std::size_t count, ReduceOp op, bool in_place, bool shared) {
  Engines ranks(std::vector<int>(static_cast<std::size_t>(size), 0));
  std::mt19937 random(static_cast<unsigned>(count));
  std::vector<std::vector<float>> inputs(static_cast<std::size_t>(size), std::vector<float>(count));
  for (auto& input : inputs) {
    for (float& one : input) one = std::uniform_real_distribution<float>(-1, 1)(random);
  }
  std::vector<std::vector<float>> results;
  for (int round = 0; round < 3; ++round) {
    std::vector<Vector> vectors, outputs;
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < size; ++rank) {
      Vector& vector = vectors.emplace_back(ranks[rank], count, shared);
      std::copy(inputs[static_cast<std::size_t>(rank)].begin(), inputs[static_cast<std::size_t>(rank)].end(),
                vector.data());
      Request request = allreduce_of(vector);
      if (!in_place) request.tensors[0].output = outputs.emplace_back(ranks[rank], count, shared).bytes();
      request.op = op;
      request.prescale = 0.3;
      request.postscale = 1.7;
      handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
    }
    ranks.settle();
    for (int rank = 0; rank < size; ++rank) {
      const auto place = static_cast<std::size_t>(rank);
      CHECK(handles[place]->done() && !handles[place]->error);
      float* result = (in_place ? vectors : outputs)[place].data();
      results.emplace_back(result, result + count);
    }
  }
  CHECK(turns_of(ranks) == 2, "size", size, "count", count);
  for (const auto& result : results)
    CHECK(std::memcmp(result.data(), results[0].data(), count * sizeof(float)) == 0, "size", size, "count", count);
}

struct Pair {
  explicit Pair(bool shared, std::size_t count = 40'000, Config config = Config::from_environment())
      : ranks({0, 0}, config), vectors{{ranks[0], count, shared}, {ranks[1], count, shared}} {
    submit_all();
    ranks.settle();
  }
  std::shared_ptr<Handle> submit(int rank) {
    Vector& vector = vectors[rank];
    std::fill_n(vector.data(), vector.count, static_cast<float>(rank + 1));
    return ranks[rank].scheduler.submit(allreduce_of(vector));
  }
  void submit_all() { handles = {submit(0), submit(1)}; }
  // Both ranks enter the first turn; rank 0 ends it, and enters the second one.
  void go_halfway() {
    submit_all();
    for (const int rank : {0, 1}) CHECK(ranks[rank].scheduler.announce() && entered(rank));
    CHECK(ranks[0].scheduler.end_turns() && halfway(0) && !handles[0]->done());
  }
  bool entered(int rank) { return ranks[rank].scheduler.sets().at(0)->entered.has_value(); }
  bool halfway(int rank) { return ranks[rank].scheduler.sets().at(0)->one_shot()->halfway(); }
  bool has_sum(int rank) {
    const Vector& vector = vectors[rank];
    float* data = vectors[rank].data();
    return std::all_of(data, data + vector.count, [](float value) { return value == 3; });
  }

  Engines ranks;
  Vector vectors[2];
  std::vector<std::shared_ptr<Handle>> handles;
};

// The others have changed their memory by then, so they could not negotiate the operation.
void a_second_turn_is_not_taken_back(bool shared) {
  Pair pair(shared);
  pair.go_halfway();
  pair.ranks[0].scheduler.withdraw();
  CHECK(pair.entered(0) && !pair.ranks[0].scheduler.settled());
  pair.ranks[0].scheduler.note_left(1);  // also closes the set's turns to new operations
  CHECK(!pair.ranks[0].scheduler.end_turns());
  CHECK(pair.ranks[1].scheduler.end_turns() && pair.halfway(1));
  CHECK(pair.ranks[0].scheduler.end_turns() && pair.ranks[1].scheduler.end_turns());
  for (const int rank : {0, 1}) CHECK(pair.handles[static_cast<std::size_t>(rank)]->done() && pair.has_sum(rank));
}

void who_is_missing_in_a_second_turn_is_named() {
  Config config = Config::from_environment();
  config.timeout_s = 30;
  Pair pair(false, 40'000, config);
  pair.go_halfway();
  pair.ranks[0].failures.watch(pair.ranks[0].in(29));
  try {
    pair.ranks[0].failures.watch(pair.ranks[0].in(31));
    CHECK(false);
  } catch (const Timeout& error) {
    CHECK(error.missing == std::vector<int>{1} && error.operation == "allreduce.x");
  }
}

// A rank that agreed, and then left without ending the operation, as a program may by mistake.
void a_second_turn_ends_if_a_rank_leaves_in_it() {
  Pair pair(false);
  pair.go_halfway();
  pair.ranks[1].transport->post(0, goodbye());
  pair.ranks[0].poll();
  pair.ranks[0].failures.watch(pair.ranks[0].in(0.9));
  try {
    pair.ranks[0].failures.watch(pair.ranks[0].in(1.1));
    CHECK(false);
  } catch (const PeerLost&) {
  }
}

// A rank gives up after all have agreed, in the first turn or in the second one, and its caller changes its memory. The
// other one must not take what it reads.
void what_a_rank_gave_up_is_not_taken(bool in_second) {
  Pair pair(true);
  pair.submit_all();
  for (const int rank : {0, 1}) CHECK(pair.ranks[rank].scheduler.announce() && pair.entered(rank));
  if (in_second) CHECK(pair.ranks[1].scheduler.end_turns() && pair.halfway(1));
  pair.ranks[1].scheduler.end(std::make_exception_ptr(Error("another operation has failed")), true);
  CHECK(pair.handles[1]->done() && pair.handles[1]->error);
  pair.ranks[0].scheduler.end_turns();
  CHECK(pair.halfway(0) && !pair.handles[0]->done());
  for (int times = 0; times < 5; ++times) pair.ranks[0].poll();
  CHECK(!pair.handles[0]->done());
  pair.ranks[0].scheduler.end(std::make_exception_ptr(PeerLost("rank 1 has failed", {1})), true);
  CHECK(pair.handles[0]->done() && pair.handles[0]->error);
}

// Ranks that go on after a loss negotiate, because a lost rank would never enter the second turn.
void ranks_that_tolerate_losses_take_no_second_turn(bool shared) {
  Pair pair(shared);
  for (const int rank : {0, 1}) pair.ranks[rank].common.peers.tolerate_losses();
  const std::uint64_t before = turns_of(pair.ranks);
  pair.submit_all();
  pair.ranks.settle();
  for (const int rank : {0, 1}) CHECK(pair.handles[static_cast<std::size_t>(rank)]->done() && pair.has_sum(rank));
  CHECK(turns_of(pair.ranks) == before);
}

// A result in other memory is not written to the inputs.
void an_all_reduce_to_other_memory_is_negotiated() {
  Pair pair(true);
  Vector results[] = {{pair.ranks[0], pair.vectors[0].count, true}, {pair.ranks[1], pair.vectors[1].count, true}};
  for (int round = 0; round < 3; ++round) {
    for (const int rank : {0, 1}) {
      std::fill_n(pair.vectors[rank].data(), pair.vectors[rank].count, static_cast<float>(rank + 1));
      Request request = allreduce_of(pair.vectors[rank]);
      request.tensors[0].output = results[rank].bytes();
      pair.handles[static_cast<std::size_t>(rank)] = pair.ranks[rank].scheduler.submit(std::move(request));
    }
    pair.ranks.settle();
    for (const int rank : {0, 1}) {
      CHECK(pair.handles[static_cast<std::size_t>(rank)]->done() && pair.vectors[rank].data()[0] == rank + 1);
      std::swap(pair.vectors[rank], results[rank]);
      CHECK(pair.has_sum(rank));
      std::swap(pair.vectors[rank], results[rank]);
    }
  }
}

// All-gathers of two ranks whose private memory the kernel copies.
struct Gathers {
  static constexpr std::size_t kCount = 40'000;

  ~Gathers() { Copied::kernel = Copied::Kernel::kCopies; }
  std::shared_ptr<Handle> submit(int rank, int round) {
    std::fill_n(inputs[rank].data(), kCount, static_cast<float>(10 * round + rank));
    Request request = request_of(Opcode::kAllgather, inputs[rank], false);
    request.name = "allgather.x";
    return ranks[rank].scheduler.submit(std::move(request));
  }
  void run(int round, std::uint64_t turns) {
    const std::vector<std::shared_ptr<Handle>> handles{submit(0, round), submit(1, round)};
    const std::uint64_t before = turns_of(ranks);
    ranks.settle();
    for (const auto& handle : handles) {
      CHECK(handle->done() && !handle->error && handle->results.size() == 1, "round", round);
      CHECK(handle->rows == std::vector<std::int64_t>(2, kCount), "round", round);
      const auto* result = reinterpret_cast<const float*>(handle->results[0].data.get());
      CHECK(result[0] == 10 * round && result[kCount] == 10 * round + 1 && result[2 * kCount - 1] == 10 * round + 1);
    }
    CHECK(turns_of(ranks) == before + turns, "round", round);
  }

  Engines ranks = engines(2, true);
  Vector inputs[2] = {{ranks[0], kCount, false}, {ranks[1], kCount, false}};
};

// Then no rank has a result of the second turn, and the operation is negotiated, and passes through slots from then on.
void copies_that_the_kernel_refuses() {
  Gathers gathers;
  gathers.run(0, 0);
  gathers.run(1, 1);
  Copied::kernel = Copied::Kernel::kRefuses;
  gathers.run(2, 0);
  for (const int rank : {0, 1}) {
    Scheduler& scheduler = gathers.ranks[rank].scheduler;
    CHECK(!scheduler.in_two_turns() && !scheduler.sets().at(0)->one_shot()->halfway());
  }
  Copied::kernel = Copied::Kernel::kCopies;
  gathers.run(3, 0);
}

void copies_from_a_process_that_is_gone() {
  Gathers gathers;
  gathers.run(0, 0);
  Copied::kernel = Copied::Kernel::kFindsNoProcess;
  const auto mine = gathers.submit(0, 1), theirs = gathers.submit(1, 1);
  for (const int rank : {0, 1}) gathers.ranks[rank].scheduler.announce();
  try {
    gathers.ranks[0].scheduler.end_turns();
    CHECK(false);
  } catch (const PeerLost& error) {
    CHECK(error.ranks == std::vector<int>{1});
  }
  CHECK(!mine->done() && !theirs->done());
}

// An operation that ran in shared memory is called with ordinary memory: the turn has no result on any rank, and the
// next repeat passes through slots.
void memory_that_cannot_be_reached_is_negotiated() {
  Pair pair(true);
  const std::uint64_t before = turns_of(pair.ranks);
  Vector ordinary(pair.ranks[0], pair.vectors[0].count, false);
  std::swap(pair.vectors[0], ordinary);
  for (int round = 0; round < 3; ++round) {
    pair.submit_all();
    pair.ranks.settle();
    for (const int rank : {0, 1}) CHECK(pair.handles[static_cast<std::size_t>(rank)]->done() && pair.has_sum(rank));
    CHECK(turns_of(pair.ranks) == before + static_cast<std::uint64_t>(round), "round", round);
  }
}

// Ranks are threads that run freely: some are late, and some submit their operations and wait for them.
void threads_in_any_order(bool shared) {
  constexpr int kRanks = 3, kTurns = 300;
  constexpr std::size_t kCount = 30'000;
  const Config config = Config::from_environment();
  std::vector<std::unique_ptr<World>> worlds;
  for (auto& transport : sim::Network(std::vector<int>(kRanks, 0)).transports())
    worlds.push_back(std::make_unique<World>(std::move(transport), config));
  std::vector<std::size_t> wrong(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      World& world = *worlds[static_cast<std::size_t>(rank)];
      std::vector<float> own(shared ? 0 : kCount);
      const auto segment = shared ? world.node_memory().allocate(kCount * sizeof(float)) : nullptr;
      float* values = shared ? reinterpret_cast<float*>(segment->data) : own.data();
      auto* data = reinterpret_cast<std::byte*>(values);
      Signature what{ReduceOp::kSum, DType::kFloat32, 1, 1, {kCount}};
      for (int turn = 0; turn < kTurns; ++turn) {
        for (std::size_t place = 0; place < kCount; ++place)
          values[place] = static_cast<float>(turn * (rank + 1) + static_cast<int>(place % 7));
        if (turn % 50 == 10 * rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        World::Found found = turn % 17 == rank ? World::Found{} : world.find(0, "allreduce.x", what);
        if (!found.repeat || !world.repeat(0, std::move(found), data, data)) {
          Request request;
          request.name = "allreduce.x";
          request.opcode = Opcode::kAllreduce;
          request.tensors.push_back({DType::kFloat32, what.shape, data, data});
          world.wait(*world.submit_to_wait(std::move(request)));
        }
        for (std::size_t place = 0; place < kCount; ++place)
          wrong[static_cast<std::size_t>(rank)] +=
              values[place] != static_cast<float>(turn * 6 + 3 * static_cast<int>(place % 7));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<std::size_t>(kRanks));
  CHECK(worlds[0]->traffic().one_shot.load() > kTurns / 2);
}

}  // namespace

int main() {
  for (const Memory memory :
       {Memory::kOrdinary, Memory::kShared, Memory::kOfTheFirstRankIsOrdinary, Memory::kCopiedByTheKernel}) {
    for (const std::size_t count : {30'000, 110'000, 150'000}) {
      for (const int slow : {0, 2}) results_are_right_and_inputs_may_change(3, slow, count, memory);
    }
    results_are_right_and_inputs_may_change(2, 1, 33'333, memory);
  }
  results_are_right_and_inputs_may_change(2, 0, 150'000, Memory::kCopiedByTheKernel);
  for (const bool shared : {false, true}) {
    for (const int size : {2, 3, 5}) {
      for (const std::size_t count : {40'000, 65'537, 131'072}) {
        repeats_have_the_same_bits(size, count, ReduceOp::kSum, true, shared);
        repeats_have_the_same_bits(size, count, ReduceOp::kAverage, false, shared);
      }
    }
    a_second_turn_is_not_taken_back(shared);
    ranks_that_tolerate_losses_take_no_second_turn(shared);
    threads_in_any_order(shared);
  }
  who_is_missing_in_a_second_turn_is_named();
  a_second_turn_ends_if_a_rank_leaves_in_it();
  for (const bool in_second : {false, true}) what_a_rank_gave_up_is_not_taken(in_second);
  memory_that_cannot_be_reached_is_negotiated();
  an_all_reduce_to_other_memory_is_negotiated();
  copies_that_the_kernel_refuses();
  copies_from_a_process_that_is_gone();
  return report();
}
