// All-reduce in one shot within a node, polled by hand: the memory of ranks, the sequence of turns, and ranks that
// decline.
#include <signal.h>
#include <sys/mman.h>

#include <functional>
#include <limits>
#include <memory>
#include <thread>

#include "base/relax.h"
#include "check.h"
#include "collectives/one_shot_node.h"
#include "engine/world.h"
#include "one_shot_calls.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using std::chrono::milliseconds;

void what_was_done_before_needs_no_messages() {
  Engines ranks({0, 0, 0});
  agree(ranks, {"x", "y"});
  for (int turn = 0; turn < 5; ++turn) {
    std::vector<Call> calls;
    float sum = 0;
    for (int rank = 0; rank < 3; ++rank) {
      const auto value = static_cast<float>(10 * turn + rank);
      sum += value;
      CHECK(calls.emplace_back(ranks[rank], turn % 2 ? "x" : "y", value).enter());
      CHECK(calls[0].over() == (rank == 2));
    }
    for (Call& call : calls) CHECK(call.collect() && call.has(sum));
  }
  CHECK(ranks[0].common.traffic.one_shot.load() == 5);
}

void what_was_not_is_to_be_submitted() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  CHECK(!Call(ranks[0], "unknown", 1).enter());
  CHECK(!Call(ranks[0], "x", 1).enter({ReduceOp::kMax, DType::kFloat32, 1, 1, {3}}));
  CHECK(!Call(ranks[0], "x", 1).enter({ReduceOp::kSum, DType::kInt32, 1, 1, {3}}));
  CHECK(!Call(ranks[0], "x", 1).enter({ReduceOp::kSum, DType::kFloat32, 2, 1, {3}}));
  CHECK(!Call(ranks[0], "x", 1).enter({ReduceOp::kSum, DType::kFloat32, 1, 2, {3}}));
  CHECK(!Call(ranks[0], "x", 1).enter({ReduceOp::kSum, DType::kFloat32, 1, 1, {3, 1}}));
}

// The second call comes from another thread, or from a signal handler.
void who_has_entered_does_not_enter_again() {
  Engines ranks({0, 0});
  agree(ranks, {"x", "y"});
  Call one(ranks[0], "x", 1), second(ranks[0], "y", 5), other(ranks[1], "x", 2);
  CHECK(one.enter() && !second.enter() && other.enter());
  CHECK(one.collect() && other.collect() && one.has(3) && other.has(3));
  CHECK(second.enter());
}

// A fast rank is one turn ahead, and its next input does not overwrite data that a slow rank has yet to read.
void a_slow_rank_reads_what_was_laid_for_its_turn() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  for (int turn = 0; turn < 6; ++turn) {
    const auto value = static_cast<float>(turn);
    Call slow(ranks[0], "x", value), fast(ranks[1], "x", 100 * value);
    CHECK(slow.enter() && fast.enter() && fast.collect());
    Call next(ranks[1], "x", -1);
    CHECK(next.enter() && !next.over());
    CHECK(slow.collect() && slow.has(101 * value));
    Call after(ranks[0], "x", -2);
    CHECK(after.enter() && after.collect() && after.has(-3) && next.collect() && next.has(-3));
  }
}

void others_names_at_the_same_time_agree_on_nothing() {
  Engines ranks({0, 0});
  agree(ranks, {"x", "y"});
  Call x(ranks[0], "x", 1), y(ranks[1], "y", 2);
  CHECK(x.enter() && y.enter() && !x.collect() && !y.collect() && x.has(1) && y.has(2));
  agree(ranks, {"x"});  // this ends the turn
  Call one(ranks[0], "x", 1), other(ranks[1], "x", 2);
  CHECK(one.enter() && other.enter() && one.collect() && other.collect() && one.has(3) && other.has(3));
}

void who_has_announced_it_declines_at_once() {
  Engines ranks({0, 0});
  agree(ranks, {"x", "y"});
  Call x(ranks[0], "x", 1), y(ranks[0], "y", 2), their_x(ranks[1], "x", 10), their_y(ranks[1], "y", 20);
  const auto theirs = their_x.submit(), their_other = their_y.submit();
  CHECK(!Call(ranks[1], "x", 3).enter());
  ranks[1].poll();  // x enters a turn, and y is announced
  CHECK(y.enter() && y.over() && !y.collect());
  ranks[1].poll();  // now x is announced, too
  CHECK(x.enter() && !x.over());
  CHECK(ranks[1].scheduler.decline(std::chrono::steady_clock::now()));
  CHECK(!ranks[0].scheduler.decline(std::chrono::steady_clock::now()));
  CHECK(x.over() && !x.collect() && x.has(1));
  const auto mine = x.submit(), other = y.submit();
  ranks.settle();
  CHECK(mine->done() && theirs->done() && x.has(11) && their_x.has(11));
  CHECK(other->done() && their_other->done() && y.has(22) && their_y.has(22));
}

// Submissions enter turns like calls, and need no messages either.
void submissions_repeat() {
  Engines ranks({0, 0, 0});
  agree(ranks, {"x"});
  for (int turn = 1; turn < 5; ++turn) {
    std::vector<Call> calls;
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < 3; ++rank)
      handles.push_back(calls.emplace_back(ranks[rank], "x", static_cast<float>(turn * (rank + 1))).submit());
    for (int rank = 0; rank < 3; ++rank) {
      ranks[rank].scheduler.announce();
      CHECK(!ranks[rank].scheduler.end_turns() || rank == 2);
    }
    for (int rank = 0; rank < 2; ++rank) CHECK(ranks[rank].scheduler.end_turns());
    for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
    for (const Call& call : calls) CHECK(call.has(static_cast<float>(6 * turn)));
    CHECK(ranks[0].common.traffic.one_shot.load() == static_cast<std::uint64_t>(turn));
  }
}

// An unnamed submission has used up a number, and a call has not. If both were one operation, the next numbers of the
// ranks would differ.
void unnamed_submissions_and_calls_do_not_meet() {
  Engines ranks({0, 0});
  agree(ranks, {"noname."});
  Call call(ranks[0], "noname.", 1), submitted(ranks[1], "noname.", 2);
  const auto theirs = submitted.submit();
  ranks[1].poll();
  CHECK(call.enter() && call.over() && !call.collect());
  const auto mine = call.submit();
  ranks.settle();
  CHECK(mine->done() && theirs->done() && call.has(3) && submitted.has(3));
}

// A large operation has a place in the order of the set's operations. A barrier ends without the data of others, so
// rank 1 can have run it when rank 0 has not: their sequences differ, and they do not agree.
void large_ones_agree_only_at_the_same_place_of_the_order() {
  Engines ranks({0, 0});
  constexpr std::size_t kLarge = 200'000;  // more bytes than two turns carry
  const auto large_of = [&](int rank, float value) { return Call(ranks[rank], "large", value, kLarge); };
  std::vector<Call> calls{large_of(0, 1), large_of(1, 2)};
  const auto submit_all = [&] {
    std::vector<std::shared_ptr<Handle>> handles{calls[0].submit(), calls[1].submit()};
    ranks.settle();
    CHECK(handles[0]->done() && handles[1]->done());
  };
  submit_all();
  CHECK(calls[0].has(3) && calls[1].has(3));
  const std::uint64_t before = ranks[0].scheduler.sets().at(0)->sequence();
  submit_all();  // in a turn
  CHECK(calls[0].has(6) && calls[1].has(6) && ranks[0].scheduler.sets().at(0)->sequence() == before + 1);
  const auto first = calls[0].submit();
  ranks[0].poll();  // has entered
  const auto barrier = ranks[0].scheduler.submit(barrier_called("new")),
             theirs = ranks[1].scheduler.submit(barrier_called("new"));
  for (int times = 0; times < 5; ++times) {
    ranks[0].poll();
    ranks[1].poll();
  }
  CHECK(theirs->done() && !barrier->done());  // rank 0 holds the decision
  const auto second = calls[1].submit();
  ranks.settle();
  CHECK(first->done() && second->done() && barrier->done() && calls[0].has(12) && calls[1].has(12));
}

void who_has_joined_declines_at_once_and_who_does_something_else_later() {
  Engines ranks({0, 0});
  agree(ranks, {"x", "y"});
  Call waiting(ranks[0], "x", 1);
  const Time now = std::chrono::steady_clock::now();
  ranks[1].scheduler.submit(barrier_called("unknown"));
  CHECK(waiting.enter() && !ranks[1].scheduler.decline(now) && ranks[1].scheduler.decline(now + milliseconds(10)));
  CHECK(!waiting.collect());
  Request join = barrier_called("join");
  join.opcode = Opcode::kJoin;
  ranks[1].scheduler.submit(std::move(join));
  ranks[1].poll();
  Call other(ranks[0], "y", 1);
  CHECK(other.enter() && ranks[1].scheduler.decline(now) && !other.collect());
}

void who_does_nothing_declines_after_a_while() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  Call waiting(ranks[0], "x", 1);
  CHECK(waiting.enter());
  const Time now = std::chrono::steady_clock::now();
  CHECK(!ranks[1].scheduler.decline(now) && !ranks[1].scheduler.decline(now + milliseconds(9)));
  CHECK(!waiting.over());
  CHECK(ranks[1].scheduler.decline(now + milliseconds(10)));
  CHECK(waiting.over() && !waiting.collect());
}

// A rank that has declined turns t and t + 1 may not publish for t + 2 before all ranks have read the data of turn t.
void who_has_declined_waits_for_who_is_slow() {
  Engines ranks({0, 0, 0});
  agree(ranks, {"x", "y", "z"});
  const Time now = std::chrono::steady_clock::now(), later = now + milliseconds(20);
  const auto decline = [&] {
    ranks[2].scheduler.decline(now);
    CHECK(ranks[2].scheduler.decline(later));
  };
  Call fast(ranks[0], "x", 1), slow(ranks[1], "x", 2);
  CHECK(fast.enter() && slow.enter());
  decline();
  CHECK(!fast.collect());
  Call next(ranks[0], "y", 3);
  CHECK(next.enter());
  decline();
  Call last(ranks[2], "x", 4);
  CHECK(!last.enter());
  CHECK(!slow.collect() && slow.has(2));
  Call behind(ranks[1], "z", 5);
  CHECK(behind.enter() && !behind.collect() && !next.collect());
  CHECK(last.enter());
}

void nobody_waits_for_who_has_left() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  Call waiting(ranks[0], "x", 1);
  CHECK(waiting.enter());
  ranks[1].transport->post(0, goodbye());
  ranks[0].poll();
  CHECK(ranks[0].scheduler.sets().at(0)->one_shot()->closed() && !waiting.collect());
  CHECK(!Call(ranks[0], "x", 1).enter());
}

// Submits the change of a set on both ranks. `changes`: one for each rank.
std::vector<std::shared_ptr<Handle>> change_sets(Engines& ranks, Opcode opcode, const std::vector<SetChange>& changes) {
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < 2; ++rank) {
    Request request = barrier_called("change");
    request.opcode = opcode;
    request.set_change = changes[static_cast<std::size_t>(rank)];
    handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
  }
  return handles;
}

int added_set(Engines& ranks) {
  const auto handles = change_sets(ranks, Opcode::kAddSet, {{{0, 1}}, {{0, 1}}});
  ranks.settle();
  return handles.front()->set_id;
}

// A set that rank 0 has removed, and rank 1 has not.
struct HalfRemoved {
  explicit HalfRemoved(Engines& ranks)
      : id(added_set(ranks)), memory(ranks[0].transport->node_memory()), looker(ranks[1].scheduler) {
    memory.take_freed();
    handles = change_sets(ranks, Opcode::kRemoveSet, {{{}, id}, {{}, id}});
    ranks[1].poll();
    while (!handles[0]->done()) ranks[0].poll();
    CHECK(!handles[1]->done() && !ranks[0].scheduler.sets().contains(id));
  }
  // Rank 1 looks at the slots of rank 0, whose memory must still be there.
  void look() {
    CHECK(memory.take_freed().empty());
    OneShot& shot = *looker.sets().at(id)->one_shot();
    CHECK(shot.free() && shot.awaited().empty());
  }

  const int id;
  NodeMemory& memory;
  Scheduler& looker;
  std::vector<std::shared_ptr<Handle>> handles;
};

void the_slots_of_a_removed_set_stay_for_others() {
  Engines ranks({0, 0});
  HalfRemoved set(ranks);
  for (int times = 0; times < 3; ++times) ranks[0].poll();
  set.look();
  ranks.settle();
  CHECK(set.handles[1]->done() && !ranks[1].scheduler.sets().contains(set.id));
  CHECK(set.memory.take_freed().size() == 1);
}

// Rank 1 has said goodbye before it removes the set. It looks at the slots of rank 0 until the end of its world.
void the_slots_of_a_removed_set_stay_for_a_rank_that_has_left() {
  Engines ranks({0, 0});
  HalfRemoved set(ranks);
  ranks[1].transport->post(0, goodbye());
  for (int times = 0; times < 3; ++times) ranks[0].poll();
  set.look();
}

// The ranks ask to remove different sets, which is refused. Both sets stay usable.
void a_set_whose_removal_is_refused_goes_on() {
  Engines ranks({0, 0});
  const int one = added_set(ranks), other = added_set(ranks);
  for (const auto& handle : change_sets(ranks, Opcode::kRemoveSet, {{{}, one}, {{}, other}})) {
    ranks.settle();
    CHECK(!error_of<OperationMismatch>(*handle).empty());
  }
  for (int rank = 0; rank < 2; ++rank) {
    for (const int id : {one, other}) {
      OneShot& shot = *ranks[rank].scheduler.sets().at(id)->one_shot();
      CHECK(shot.free() && !shot.closed());
    }
  }
}

// Data that a rank published before it left is complete: a later reader gets it.
void who_lays_and_leaves_has_entered() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  Call slow(ranks[0], "x", 1), fast(ranks[1], "x", 2);
  CHECK(slow.enter() && fast.enter() && fast.collect());
  ranks[1].transport->post(0, goodbye());
  ranks[0].poll();
  CHECK(slow.collect() && slow.has(3));
}

// Submits on a rank, which enters a turn.
std::shared_ptr<Handle> entered(Engine& rank, Call& call) {
  const auto handle = call.submit();
  rank.scheduler.announce();
  CHECK(rank.scheduler.sets().at(0)->entered.has_value());
  return handle;
}

// No rank gets a result of a turn that was open when a rank left, not even a rank that enters later and has not heard
// that the other left.
void a_rank_that_leaves_takes_its_entry_back() {
  Engines ranks({0, 0, 0});
  agree(ranks, {"x"});
  std::vector<Call> calls;
  for (int rank = 0; rank < 3; ++rank) calls.emplace_back(ranks[rank], "x", static_cast<float>(rank + 1));
  const auto leaving = entered(ranks[0], calls[0]), other = entered(ranks[1], calls[1]);
  ranks[0].scheduler.withdraw();
  CHECK(ranks[0].scheduler.settled() && !ranks[1].scheduler.settled());
  const auto late = entered(ranks[2], calls[2]);
  CHECK(ranks[1].scheduler.end_turns() && ranks[2].scheduler.end_turns());
  ranks[0].transport->post(1, goodbye());
  ranks[0].transport->post(2, goodbye());
  for (int times = 0; times < 3; ++times) {
    ranks[1].poll();
    ranks[2].poll();
  }
  ranks[1].failures.watch(ranks[1].in(0));
  ranks[2].failures.watch(ranks[2].in(0));
  CHECK(!leaving->done() && !error_of<PeerLost>(*other).empty() && !error_of<PeerLost>(*late).empty());
  CHECK(calls[1].has(2) && calls[2].has(3));
}

// If all have entered, some may have their result. So the rank that leaves takes its result, too.
void a_rank_that_leaves_when_all_have_entered_has_its_result() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  Call leaving(ranks[0], "x", 1), other(ranks[1], "x", 2);
  const auto mine = entered(ranks[0], leaving), theirs = entered(ranks[1], other);
  ranks[0].scheduler.withdraw();
  CHECK(!ranks[0].scheduler.settled() && ranks[0].scheduler.end_turns() && ranks[1].scheduler.end_turns());
  CHECK(mine->done() && !mine->error && leaving.has(3) && theirs->done() && !theirs->error && other.has(3));
}

struct Leaving : OneShotNode {
  using OneShot::withdraw_unless, OneShotNode::OneShotNode;
};

// The other rank closes before this rank takes its entry back, or after this rank has looked whether all have entered.
void an_entry_that_another_rank_has_counted_is_not_taken_back() {
  const auto repeat = std::make_shared<Repeat>();
  std::vector<std::unique_ptr<OneShotSlots>> memory;
  for (int rank = 0; rank < 2; ++rank) memory.push_back(std::make_unique<OneShotSlots>());
  const std::vector slots{memory[0].get(), memory[1].get()};
  const auto transports = sim::Network({0, 0}).transports();
  Leaving one(slots, {0, 1}, 0, true, {0, 1}, transports[0]->node_memory());
  OneShotNode other(slots, {0, 1}, 1, true, {0, 1}, transports[1]->node_memory());
  one.enter(repeat, {4, 0}, nullptr, nullptr);
  CHECK(!one.withdraw_unless([&] {
    other.enter(repeat, {4, 0}, nullptr, nullptr);
    CHECK(other.over() && other.close());
    return false;
  }));
  CHECK(one.over() && one.close());
  one.enter(repeat, {4, 0}, nullptr, nullptr);
  other.enter(repeat, {4, 0}, nullptr, nullptr);
  CHECK(other.close() && !one.withdraw() && one.close());
  one.enter(repeat, {6, 0}, nullptr, nullptr);
  CHECK(one.withdraw() && one.awaited().empty());
  other.enter(repeat, {6, 0}, nullptr, nullptr);
  CHECK(other.over() && !other.close() && one.free());
}

// Two ranks in threads, one of which takes its entry back at any moment: both always have the same outcome.
void threads_agree_on_entries_that_are_taken_back() {
  constexpr int kTurns = 20'000;
  const auto repeat = std::make_shared<Repeat>();
  std::vector<std::unique_ptr<OneShotSlots>> memory;
  for (int rank = 0; rank < 2; ++rank) memory.push_back(std::make_unique<OneShotSlots>());
  const std::vector slots{memory[0].get(), memory[1].get()};
  const auto transports = sim::Network({0, 0}).transports();
  std::vector<char> outcomes[2];
  const auto run = [&](std::size_t rank) {
    OneShotNode shot(slots, {0, 1}, rank, true, {0, 1}, transports[rank]->node_memory());
    for (int turn = 0; turn < kTurns; ++turn) {
      while (!shot.free()) std::this_thread::yield();
      for (int wait = 0; wait < turn % (rank == 0 ? 7 : 11); ++wait) relax();
      shot.enter(repeat, {4, 0}, nullptr, nullptr);
      if (rank == 0 && shot.withdraw()) {
        outcomes[rank].push_back(false);
        continue;
      }
      while (!shot.over()) std::this_thread::yield();
      outcomes[rank].push_back(shot.close());
    }
  };
  std::thread other(run, 1);
  run(0);
  other.join();
  CHECK(outcomes[0] == outcomes[1]);
}

// A rank that computes checks for waiting ranks every 50 ms. When some wait, it checks much more often until it has
// declined.
void who_is_awaited_looks_again_soon() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  const Time now = std::chrono::steady_clock::now();
  ranks[1].scheduler.decline(now);
  CHECK(!ranks[1].scheduler.awaited());
  Call waiting(ranks[0], "x", 1);
  CHECK(waiting.enter());
  CHECK(!ranks[1].scheduler.decline(now) && ranks[1].scheduler.awaited());
  CHECK(!ranks[0].scheduler.awaited());
  CHECK(ranks[1].scheduler.decline(now + milliseconds(20)) && !ranks[1].scheduler.awaited());
}

void who_stands_still_is_named() {
  Config config = Config::from_environment();
  config.timeout_s = 30;
  Engines ranks({0, 0}, config);
  agree(ranks, {"x"});
  Call waiting(ranks[0], "x", 1);
  CHECK(waiting.enter());
  ranks[0].failures.watch(ranks[0].in(29));
  try {
    ranks[0].failures.watch(ranks[0].in(31));
    CHECK(false);
  } catch (const Timeout& error) {
    CHECK(error.missing == std::vector<int>{1} && error.operation == "allreduce.x");
  }
}

// Ranks are threads that run freely: some are late, and some submit their operations and wait for them.
void threads_in_any_order() {
  constexpr int kRanks = 3, kTurns = 3000;
  const Config config = Config::from_environment();
  std::vector<std::unique_ptr<World>> worlds;
  for (auto& transport : sim::Network(std::vector<int>(kRanks, 0)).transports())
    worlds.push_back(std::make_unique<World>(std::move(transport), config));
  std::vector<int> wrong(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      World& world = *worlds[static_cast<std::size_t>(rank)];
      for (int turn = 0; turn < kTurns; ++turn) {
        Values values(3, static_cast<float>(turn * (rank + 1)));
        auto* data = reinterpret_cast<std::byte*>(values.data());
        if (turn % 500 == 100 * rank) std::this_thread::sleep_for(milliseconds(1));
        const bool usual = turn % 97 == rank;
        if (usual || !again(world, kSum, data)) world.wait(*world.submit_to_wait(allreduce_of("allreduce.x", values)));
        wrong[static_cast<std::size_t>(rank)] += values != Values(3, static_cast<float>(turn * 6));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(kRanks));
  CHECK(worlds[0]->traffic().one_shot.load() > kTurns / 2);
}

// Memory that cannot be read at first. The first read calls look(), in the reading thread, and then continues.
class Guarded {
 public:
  explicit Guarded(std::function<void()> look) : look_(std::move(look)) {
    now_ = this;
    struct sigaction action{};
    action.sa_handler = [](int) {
      now_->look_();
      mprotect(now_->data(), kBytes, PROT_READ | PROT_WRITE);
    };
    sigaction(SIGSEGV, &action, &before_);
  }
  ~Guarded() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(data_, kBytes);
  }
  std::byte* data() { return static_cast<std::byte*>(data_); }

 private:
  static constexpr std::size_t kBytes = 4096;
  static inline Guarded* now_ = nullptr;

  std::function<void()> look_;
  void* data_ = mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct sigaction before_{};
};

// While a rank is about to copy its input, another rank that looks sees no slot yet.
void a_slot_is_complete_when_it_is_seen() {
  Engines ranks({0, 0});
  agree(ranks, {"x"});
  Call first(ranks[0], "x", 1);
  CHECK(first.enter());
  int looks = 0;
  bool seen = false;
  Guarded input([&] {
    ++looks;
    seen = first.over();
  });
  const auto repeat = ranks[1].scheduler.find(0, "allreduce.x", kSum);
  const auto set = ranks[1].scheduler.enter_call(0, repeat, input.data(), input.data());
  CHECK(set && looks == 1 && !seen && first.over());
  CHECK(ranks[1].scheduler.collect(*set, input.data(), input.data()) == Scheduler::Collected::kAll);
  CHECK(first.collect() && first.has(1));
}

// A rank that is alone agrees with itself, on every valid operation.
void a_rank_that_is_alone_does_all_at_once() {
  Engines ranks({0});
  for (const std::size_t length : {3, 100'000}) {
    Call call(ranks[0], "new" + std::to_string(length), 2, length);
    CHECK(call.enter() && call.over() && call.collect() && call.has(2));
  }
  Call submitted(ranks[0], "submitted", 4);
  const auto handle = submitted.submit();
  ranks[0].scheduler.announce();
  CHECK(ranks[0].scheduler.end_turns() && handle->done() && !handle->error && submitted.has(4));
  CHECK(ranks[0].common.traffic.one_shot.load() == 3);

  Scheduler& scheduler = ranks[0].scheduler;
  Signature what = kSum;
  CHECK(scheduler.find(0, "allreduce.a", what) && !scheduler.find(1, "allreduce.a", what));
  what.prescale = std::numeric_limits<double>::infinity();
  CHECK(!scheduler.find(0, "allreduce.a", what));
  what = kSum;
  what.op = ReduceOp::kAdasum;
  CHECK(!scheduler.find(0, "allreduce.a", what));
  what = kSum;
  what.opcode = Opcode::kBroadcast;
  CHECK(scheduler.find(0, "broadcast.a", what));
  what.root = 1;
  CHECK(!scheduler.find(0, "broadcast.a", what));
  what = kSum;
  what.opcode = Opcode::kAlltoall;
  CHECK(!scheduler.find(0, "alltoall.a", what));
  for (const std::int64_t rows : {-1, 0, 3, 4}) {
    what.splits = {rows};
    const auto found = scheduler.find(0, "alltoall.a", what);
    CHECK((rows == 0 || rows == 3) == (found != nullptr));
    CHECK(!found || found->recipe.shape == std::vector<std::int64_t>{rows});
  }
  what = kSum;
  what.shape.clear();
  CHECK(scheduler.find(0, "allreduce.a", what));
  for (const Opcode opcode : {Opcode::kAllgather, Opcode::kReducescatter, Opcode::kJoin}) {
    what.opcode = opcode;
    CHECK(!scheduler.find(0, "a", what));
  }
  ranks[0].common.ledger.keep_spans(true);  // which show submissions
  CHECK(!scheduler.find(0, "allreduce.a", kSum));
}

void endless_names_displace_none_that_repeats() {
  Engines ranks({0, 0});
  agree(ranks, {"x", "once"});
  for (int part = 0; part < 10; ++part) {
    std::vector<std::string> names;
    for (int name = 0; name < 1000; ++name) names.push_back(std::to_string(1000 * part + name));
    agree(ranks, names);
    std::vector<Call> calls;
    for (int rank = 0; rank < 2; ++rank) CHECK(calls.emplace_back(ranks[rank], "x", 1.0f).enter());
    for (Call& call : calls) CHECK(call.collect() && call.has(2));
  }
  CHECK(!Call(ranks[0], "once", 1).enter());
}

// Data of two successive turns never overlap, whatever their sizes, and the place of larger data moves on.
void data_have_a_place_per_turn() {
  const auto slots = std::make_unique_for_overwrite<OneShotSlots>();
  const std::byte* begin = reinterpret_cast<const std::byte*>(slots.get());
  constexpr std::size_t kSizes[] = {1, 40, 41, 4096, 8192, 8193, 20000, 40000, 65536};
  for (std::uint64_t turn = 1; turn < 200; ++turn) {
    for (const std::size_t most : kSizes) {
      const std::byte* data = slots->data(turn, most);
      CHECK(data >= begin && data + most <= begin + OneShotSlots::used(most), "turn", turn, "most", most);
      for (const std::size_t next : kSizes) {
        const std::byte* other = slots->data(turn + 1, next);
        CHECK(data + most <= other || other + next <= data, "turn", turn, "most", most, "next", next);
      }
      std::uint64_t later = turn + 1;
      while (slots->data(later, most) != data) ++later;
      if (most > OneShotSlots::kStays) CHECK(later - turn >= 16, "turn", turn, "most", most, "later", later);
    }
  }
}

}  // namespace

int main() {
  data_have_a_place_per_turn();
  a_rank_that_is_alone_does_all_at_once();
  endless_names_displace_none_that_repeats();
  what_was_done_before_needs_no_messages();
  what_was_not_is_to_be_submitted();
  who_has_entered_does_not_enter_again();
  a_slow_rank_reads_what_was_laid_for_its_turn();
  others_names_at_the_same_time_agree_on_nothing();
  who_has_announced_it_declines_at_once();
  submissions_repeat();
  unnamed_submissions_and_calls_do_not_meet();
  large_ones_agree_only_at_the_same_place_of_the_order();
  who_has_joined_declines_at_once_and_who_does_something_else_later();
  who_does_nothing_declines_after_a_while();
  who_has_declined_waits_for_who_is_slow();
  nobody_waits_for_who_has_left();
  the_slots_of_a_removed_set_stay_for_others();
  the_slots_of_a_removed_set_stay_for_a_rank_that_has_left();
  a_set_whose_removal_is_refused_goes_on();
  who_lays_and_leaves_has_entered();
  a_rank_that_leaves_takes_its_entry_back();
  a_rank_that_leaves_when_all_have_entered_has_its_result();
  an_entry_that_another_rank_has_counted_is_not_taken_back();
  threads_agree_on_entries_that_are_taken_back();
  who_is_awaited_looks_again_soon();
  who_stands_still_is_named();
  threads_in_any_order();
  a_slot_is_complete_when_it_is_seen();
  return sordino::test::report();
}
