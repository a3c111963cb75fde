// The scheduler of one rank among others, polled by hand: when an operation begins, in which order, and how it ends.
#include "check.h"
#include "collectives/exchange.h"
#include "engine/scheduler.h"
#include "engines.h"
#include "wrapped.h"

using namespace sordino;
using namespace sordino::test;

namespace {

const std::vector<int> kTogether{0, 0}, kApart{0, 1};

void ranks_may_submit_in_any_order(const std::vector<int>& nodes) {
  Engines ranks(nodes);
  std::vector<std::vector<float>> a, b;
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    a.push_back(std::vector<float>(1000, 1.0f + static_cast<float>(rank)));
    b.push_back(std::vector<float>(3, 10.0f * static_cast<float>(rank)));
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    auto &first = a[static_cast<std::size_t>(rank)], &second = b[static_cast<std::size_t>(rank)];
    Scheduler& scheduler = ranks[rank].scheduler;
    if (rank % 2 == 0) handles.push_back(scheduler.submit(allreduce_of("a", first)));
    handles.push_back(scheduler.submit(allreduce_of("b", second)));
    if (rank % 2 == 1) handles.push_back(scheduler.submit(allreduce_of("a", first)));
  }
  ranks.settle();
  for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
  float sum_a = 0, sum_b = 0;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    sum_a += 1.0f + static_cast<float>(rank);
    sum_b += 10.0f * static_cast<float>(rank);
  }
  for (int rank = 0; rank < ranks.size(); ++rank) {
    CHECK(a[static_cast<std::size_t>(rank)] == std::vector<float>(1000, sum_a));
    CHECK(b[static_cast<std::size_t>(rank)] == std::vector<float>(3, sum_b));
  }
}

void nothing_runs_before_all_have_submitted() {
  Engines ranks(kTogether);
  const auto mine = ranks[0].scheduler.submit(barrier_called("all"));
  CHECK(ranks[0].scheduler.busy());
  ranks.settle();
  CHECK(!mine->done() && ranks[0].scheduler.settled());
  CHECK((ranks[0].scheduler.names_in_flight() == std::vector<std::string>{"all"}));
  const auto theirs = ranks[1].scheduler.submit(barrier_called("all"));
  ranks.settle();
  CHECK(mine->done() && theirs->done());
  CHECK(!ranks[0].scheduler.busy() && ranks[0].scheduler.names_in_flight().empty());
  const auto again = ranks[0].scheduler.submit(barrier_called("all"));  // the name is free again
  CHECK(!again->done());
}

void what_one_rank_sees_is_refused_at_once() {
  Engines ranks(kTogether);
  ranks[0].scheduler.submit(barrier_called("twice"));
  CHECK_THROWS(UsageError, ranks[0].scheduler.submit(barrier_called("twice")));
  ranks[0].poll();
  CHECK_THROWS(UsageError, ranks[0].scheduler.submit(barrier_called("twice")));
  CHECK_THROWS(UsageError, ranks[0].scheduler.submit(barrier_called("nowhere", 7)));
  CHECK_THROWS(UsageError, ranks[0].scheduler.members(7));
  CHECK((ranks[0].scheduler.names_in_flight() == std::vector<std::string>{"twice"}));
}

void a_difference_fails_that_operation_alone() {
  Engines ranks(kApart);
  std::vector<float> few(3), many(4), good(5), same(5);
  const auto mine = ranks[0].scheduler.submit(allreduce_of("x", few));
  const auto theirs = ranks[1].scheduler.submit(allreduce_of("x", many));
  const auto first = ranks[0].scheduler.submit(allreduce_of("y", good));
  const auto second = ranks[1].scheduler.submit(allreduce_of("y", same));
  ranks.settle();
  for (const auto& handle : {mine, theirs})
    CHECK(error_of<OperationMismatch>(*handle).find("rank 0 and rank 1 differ in shape") != std::string::npos);
  CHECK(first->done() && !first->error && second->done() && !second->error);
}

std::shared_ptr<Handle> change_set(Scheduler& scheduler, Opcode opcode, SetChange change,
                                   const std::string& name = "sets", int parent = 0) {
  Request request;
  request.name = name;
  request.opcode = opcode;
  request.set = parent;
  request.set_change = std::move(change);
  return scheduler.submit(std::move(request));
}

// Rank 2 sends messages about the new set to its coordinator, rank 1, before rank 1 has made it.
void sets_may_be_spoken_of_early() {
  Engines ranks({0, 0, 0});
  std::vector<std::shared_ptr<Handle>> added;
  for (int rank = 0; rank < 3; ++rank) added.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{1, 2}}));
  ranks[1].poll();
  while (!added[2]->done()) {
    ranks[0].poll();
    ranks[2].poll();
  }
  const int set = added[2]->set_id;
  CHECK((ranks[2].scheduler.members(set) == std::vector<int>{1, 2}));
  CHECK_THROWS(UsageError, ranks[0].scheduler.submit(barrier_called("not mine", set)));
  const auto theirs = ranks[2].scheduler.submit(barrier_called("in the set", set));
  ranks[2].poll();
  CHECK(!added[1]->done());
  ranks[1].poll();
  ranks.settle();
  CHECK(added[1]->done() && !theirs->done());
  const auto mine = ranks[1].scheduler.submit(barrier_called("in the set", set));
  ranks.settle();
  CHECK(mine->done() && theirs->done() && !theirs->error);
  // A set with an operation in flight stays. The number of a removed set is not used again.
  ranks[2].scheduler.submit(barrier_called("under way", set));
  CHECK_THROWS(UsageError, change_set(ranks[2].scheduler, Opcode::kRemoveSet, {{}, set}));
  ranks[1].scheduler.submit(barrier_called("under way", set));
  ranks.settle();
  std::vector<std::shared_ptr<Handle>> removed;
  for (int rank = 0; rank < 3; ++rank)
    removed.push_back(change_set(ranks[rank].scheduler, Opcode::kRemoveSet, {{}, set}));
  CHECK_THROWS(UsageError, ranks[1].scheduler.submit(barrier_called("too late", set)));
  ranks.settle();
  for (const auto& handle : removed) CHECK(handle->done() && !handle->error);
  CHECK((ranks[1].scheduler.set_ids() == std::vector<int>{0}));
  for (int rank = 0; rank < 3; ++rank)
    added[static_cast<std::size_t>(rank)] = change_set(ranks[rank].scheduler, Opcode::kAddSet, {{0, 2}});
  ranks.settle();
  CHECK(added[0]->set_id == set + 1);  // no number is used twice
}

// Two threads of each rank add sets at once, in any order.
void sets_that_are_added_at_once_differ() {
  Engines ranks({0, 0, 0});
  std::vector<std::shared_ptr<Handle>> parents, first, second, inner;
  for (int rank = 0; rank < 3; ++rank) parents.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{0, 1}}));
  ranks.settle();
  const int parent = parents[0]->set_id;
  for (int rank = 0; rank < 3; ++rank) {
    Scheduler& scheduler = ranks[rank].scheduler;
    if (rank != 1) first.push_back(change_set(scheduler, Opcode::kAddSet, {{0, 1}}, "first"));
    second.push_back(change_set(scheduler, Opcode::kAddSet, {{0, 2}}, "second"));
    if (rank == 1) first.push_back(change_set(scheduler, Opcode::kAddSet, {{0, 1}}, "first"));
    if (rank < 2) inner.push_back(change_set(scheduler, Opcode::kAddSet, {{0, 1}}, "inner", parent));
  }
  ranks.settle();
  std::set<int> ids;
  for (const auto& handles : {first, second, inner}) {
    for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
    for (const auto& handle : handles) CHECK(handle->set_id == handles[0]->set_id);
    ids.insert(handles[0]->set_id);
  }
  CHECK(ids.size() == 3);
  // Each of the sets works, in whatever order ranks use them.
  std::vector<std::shared_ptr<Handle>> met;
  for (const auto& [peer, id] : {std::pair{1, first[0]}, {2, second[0]}, {1, inner[0]}}) {
    for (const int rank : {0, peer}) met.push_back(ranks[rank].scheduler.submit(barrier_called("meet", id->set_id)));
  }
  ranks.settle();
  for (const auto& handle : met) CHECK(handle->done() && !handle->error);
}

Request broadcast_of(const std::string& name, int set, int root, std::vector<float>& values) {
  Request request = allreduce_of(name, values);
  request.opcode = Opcode::kBroadcast;
  request.set = set;
  request.root = root;
  return request;
}

// Rank 1 sends to rank 2 in one set, then in the other, and rank 2 hears of the second operation first.
void messages_of_two_sets_are_told_apart() {
  Engines ranks({0, 1, 2, 3});
  std::vector<int> sets;
  for (const std::vector<int>& members : {std::vector<int>{0, 1, 2}, {1, 2, 3}}) {
    std::shared_ptr<Handle> added;
    for (int rank = 0; rank < 4; ++rank) added = change_set(ranks[rank].scheduler, Opcode::kAddSet, {members});
    ranks.settle();
    sets.push_back(added->set_id);
  }
  std::vector<std::vector<float>> first, second;
  for (int rank = 0; rank < 4; ++rank) {
    first.push_back(std::vector<float>(3, static_cast<float>(10 + rank)));
    second.push_back(std::vector<float>(3, static_cast<float>(20 + rank)));
  }
  const auto submit = [&](std::size_t number, int rank) {
    auto& values = (number == 0 ? first : second)[static_cast<std::size_t>(rank)];
    ranks[rank].scheduler.submit(broadcast_of("x", sets[number], 1, values));
    ranks[rank].poll();
  };
  submit(0, 1);
  submit(0, 2);
  ranks[0].poll();
  ranks.network().cut(0, 2, true);  // so rank 2 does not hear of its start
  submit(0, 0);
  ranks[1].poll();
  CHECK(ranks[1].common.traffic.across.load() > 0);
  for (const int rank : {2, 3, 1}) submit(1, rank);
  ranks[2].poll();
  CHECK(second[2] == std::vector<float>(3, 21) && first[2] == std::vector<float>(3, 12));
  ranks.network().cut(0, 2, false);
  ranks.settle();
  for (const std::size_t rank : {0, 1, 2}) CHECK(first[rank] == std::vector<float>(3, 11), "rank", rank);
  for (const std::size_t rank : {1, 2, 3}) CHECK(second[rank] == std::vector<float>(3, 21), "rank", rank);
}

// Two coordinators cannot know each other's ids in time; no rank mixes up the messages of two sets.
void sets_of_two_coordinators_that_are_added_at_once_are_refused() {
  Engines ranks({0, 0, 0});
  std::vector<std::shared_ptr<Handle>> parents;
  for (int rank = 0; rank < 3; ++rank) parents.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{1, 2}}));
  ranks.settle();
  const int parent = parents[1]->set_id;
  for (int rank = 0; rank < 3; ++rank) {
    change_set(ranks[rank].scheduler, Opcode::kAddSet, {{1, 2}}, "of rank 0");
    if (rank > 0) change_set(ranks[rank].scheduler, Opcode::kAddSet, {{1, 2}}, "of rank 1", parent);
  }
  std::string error;
  try {
    ranks.settle();
  } catch (const TransportError& thrown) {
    error = thrown.what();
  }
  CHECK(error.find("Add them one after the other") != std::string::npos, error);
}

// This process may open no more files. The error gives this reason; the peer does not count as ended.
void a_limit_while_mapping_is_told() {
  Engines ranks({0, 0});
  ranks.network().hinder([](int) { throw TransportError("Too many open files"); });
  CHECK_THROWS(TransportError, ranks[0].poll());
}

// A rank ends before another one has mapped its memory, and an operation with it has been decided: that is a loss.
void memory_of_a_rank_that_has_ended_is_not_used() {
  for (const bool tolerates : {false, true}) {
    Engines ranks({0, 0, 0});
    ranks.network().hinder([](int rank) {
      if (rank == 2) throw MemoryGone("it is gone", rank);
    });
    std::vector<std::vector<float>> values(3, std::vector<float>(1 << 16));
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < 3; ++rank) {
      handles.push_back(ranks[rank].scheduler.submit(allreduce_of("x", values[static_cast<std::size_t>(rank)])));
      if (tolerates) ranks[rank].common.peers.tolerate_losses();
    }
    ranks[1].poll();
    ranks[2].poll();
    if (!tolerates) {
      CHECK_THROWS(PeerLost, ranks[0].poll());
      continue;
    }
    ranks[0].poll();
    CHECK(error_of<PeerLost>(*handles[0]).find("'x' needs rank 2") == 0, error_of<PeerLost>(*handles[0]));
  }
}

void the_gone_fail_what_waits_for_them() {
  Engines ranks({0, 0, 0});
  const auto mine = ranks[0].scheduler.submit(barrier_called("all"));
  const auto theirs = ranks[1].scheduler.submit(barrier_called("all"));
  ranks.settle();
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].common.peers.note_left(2, "has shut down");
    ranks[rank].scheduler.note_left(2);
  }
  ranks.settle();
  for (const auto& handle : {mine, theirs})
    CHECK(error_of<PeerLost>(*handle).find("needs rank 2, which has shut down") != std::string::npos);
}

void the_end_fails_everything() {
  Engines ranks(kApart);
  std::vector<float> mine(1000, 1), theirs(1000, 2);
  const auto running = ranks[0].scheduler.submit(allreduce_of("running", mine));
  ranks[1].scheduler.submit(allreduce_of("running", theirs));
  ranks[1].poll();
  ranks[0].poll();
  CHECK(!ranks[0].scheduler.settled());
  const auto announced = ranks[0].scheduler.submit(barrier_called("announced"));
  ranks[0].poll();
  const auto submitted = ranks[0].scheduler.submit(barrier_called("submitted"));
  const auto failure = std::make_exception_ptr(PeerLost("it is the end", {1}));
  CHECK(ranks[0].common.failure.latch(failure));
  ranks[0].scheduler.end(failure, true);
  for (const auto& handle : {running, announced, submitted}) CHECK(error_of<PeerLost>(*handle) == "it is the end");
  CHECK(!ranks[0].scheduler.busy() && ranks[0].scheduler.settled());
  CHECK_THROWS(PeerLost, ranks[0].scheduler.submit(barrier_called("later")));
}

// A decision of the coordinator must fit the requests of this rank.
void decisions_that_do_not_fit_are_refused() {
  const auto hears = [](const Decision& decision, Request asked) {
    Engines ranks(kApart);
    ranks[1].scheduler.submit(std::move(asked));
    ranks[1].poll();
    Writer writer;
    writer.put(Message::kDecision).put(0);
    decision.write(writer);
    ranks[0].transport->post(1, writer.take());
    ranks[1].poll();
  };
  Decision decision;
  decision.names = {"asked"};
  decision.participants = {0, 1};
  hears(decision, barrier_called("asked"));
  CHECK_THROWS(TransportError, hears(decision, barrier_called("something else")));
  decision.participants = {0, 2};
  CHECK_THROWS(TransportError, hears(decision, barrier_called("asked")));
  decision.participants = {1};
  Request join = barrier_called("asked");
  join.opcode = Opcode::kJoin;
  CHECK_THROWS(TransportError, hears(decision, join));
}

// A removal that is refused lets operations start again.
void after_a_refused_removal_operations_start() {
  Engines ranks({0, 0});
  std::vector<std::shared_ptr<Handle>> handles;
  for (int times = 0; times < 2; ++times) {
    for (int rank = 0; rank < 2; ++rank)
      handles.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{0, 1}}));
    ranks.settle();
  }
  const int sets[] = {handles[0]->set_id, handles[2]->set_id};
  for (int rank = 0; rank < 2; ++rank) {
    handles.push_back(change_set(ranks[rank].scheduler, Opcode::kRemoveSet, {{}, sets[rank]}));
    CHECK_THROWS(UsageError, ranks[rank].scheduler.submit(barrier_called("too early", sets[rank])));
  }
  ranks.settle();
  CHECK(!error_of<OperationMismatch>(*handles.back()).empty());
  std::vector<std::shared_ptr<Handle>> again;
  for (int rank = 0; rank < 2; ++rank) {
    for (const int set : sets) again.push_back(ranks[rank].scheduler.submit(barrier_called("again", set)));
  }
  ranks.settle();
  for (const auto& handle : again) CHECK(handle->done() && !handle->error);
}

// Transport on which no transfer with rank 2 can begin. `destroyed` counts transfers that were destroyed before their
// end.
class Failing : public Wrapped {
 public:
  Failing(std::unique_ptr<Transport> own, int& destroyed) : Wrapped(std::move(own)), destroyed_(destroyed) {}

  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    return watched(to, Wrapped::send(to, tag, data));
  }
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    return watched(from, Wrapped::receive(from, tag, data));
  }

 private:
  struct Watched : Transfer {
    Watched(std::unique_ptr<Transfer> transfer, int& count) : own(std::move(transfer)), destroyed(count) {}
    ~Watched() override { destroyed += !over; }
    bool test() override { return over = own->test(); }
    const std::unique_ptr<Transfer> own;
    int& destroyed;
    bool over = false;
  };
  std::unique_ptr<Transfer> watched(int peer, std::unique_ptr<Transfer> own) {
    if (peer == 2) throw PeerLost("rank 2 is lost", {2});
    return std::make_unique<Watched>(std::move(own), destroyed_);
  }

  int& destroyed_;
};

// Rank 1 receives from rank 0 when it finds that it cannot send to rank 2. The receive may still write to the memory of
// the task, so both the receive and the task stay.
void a_transfer_that_cannot_begin_does_not_end_the_others(Opcode opcode) {
  int destroyed = 0;
  Engines ranks({0, 1, 2}, Config::from_environment(), [&](std::unique_ptr<Transport> own) {
    return own->rank() == 1 ? std::make_unique<Failing>(std::move(own), destroyed) : std::move(own);
  });
  std::vector<std::vector<float>> values(3, std::vector<float>(1 << 20, 1));
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].common.peers.tolerate_losses();
    Request request = allreduce_of("x", values[static_cast<std::size_t>(rank)]);
    request.opcode = opcode;
    if (opcode == Opcode::kAllgather) request.tensors[0].output = nullptr;
    handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
  }
  for (int rank : {1, 2, 0}) ranks[rank].poll();
  for (int times = 0; times < 5; ++times) ranks[1].poll();
  CHECK(error_of<PeerLost>(*handles[1]) == "rank 2 is lost" && handles[1]->given_up);
  CHECK(destroyed == 0, destroyed);
}

// The world fails while a set is about to be removed: the removal ends once, with the failure.
void a_removal_in_the_middle_of_the_end_fails_once() {
  int interrupted = 0;
  for (int turns = 0; turns < 12; ++turns) {
    Engines ranks({0, 0, 0});
    std::vector<std::shared_ptr<Handle>> handles;
    for (int rank = 0; rank < 3; ++rank)
      handles.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{1, 2}}));
    ranks.settle();
    const int set = handles[2]->set_id;
    handles.clear();
    for (int rank = 0; rank < 3; ++rank)
      handles.push_back(change_set(ranks[rank].scheduler, Opcode::kRemoveSet, {{}, set}));
    for (int turn = 0; turn < turns; ++turn) {
      for (int rank = 0; rank < 3; ++rank) ranks[rank].poll();
    }
    if (handles[2]->done()) break;
    Decision decision;  // no rank has asked for this
    decision.names = {"never"};
    decision.participants = {0, 1};
    Writer writer;
    writer.put(Message::kDecision).put(set);
    decision.write(writer);
    ranks[1].transport->post(2, writer.take());
    ranks[0].poll();
    ranks[1].poll();
    CHECK_THROWS(TransportError, ranks[2].poll());
    const auto failure = std::make_exception_ptr(PeerLost("it is the end", {1}));
    ranks[2].common.failure.latch(failure);
    ranks[2].scheduler.end(failure, true);
    ranks[2].scheduler.advance();
    CHECK(error_of<PeerLost>(*handles[2]) == "it is the end");
    ++interrupted;
  }
  CHECK(interrupted > 0);
}

// Operations without a coordinator begin on each rank independently, one after the other.
void exchanges_start_in_the_order_of_the_calls() {
  Engines ranks(kApart);
  const auto ring = std::make_shared<topology::Ring>(2);
  const auto layout =
      std::make_shared<Layout>(std::vector<TensorSpec>{{"w", DType::kFloat32, {4}}}, std::size_t{1} << 20);
  std::vector<std::vector<float>> values{std::vector<float>(layout->bytes() / sizeof(float), 1),
                                         std::vector<float>(layout->bytes() / sizeof(float), 3)};
  std::vector<std::shared_ptr<Handle>> handles;
  for (int turn = 0; turn < 2; ++turn) {
    for (int rank = 0; rank < 2; ++rank) {
      auto* data = reinterpret_cast<std::byte*>(values[static_cast<std::size_t>(rank)].data());
      Request request = barrier_called("exchange " + std::to_string(turn));
      request.opcode = Opcode::kExchange;
      request.round = static_cast<std::uint64_t>(turn);
      request.exchange =
          std::make_shared<Exchange>(Exchange{layout, ring, data, data, false, false,
                                              std::make_shared<ReceiveBuffer>(ranks[rank].transport->node_memory())});
      if (turn > 0) request.after = handles[static_cast<std::size_t>(rank)];
      handles.push_back(ranks[rank].scheduler.submit(std::move(request)));
    }
  }
  ranks[0].poll();
  CHECK(!handles[0]->done() && !handles[2]->done());
  ranks.settle();
  for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
  CHECK(values[0][0] == 2 && values[1][3] == 2);
}

// Rank 2 is lost, or only late, after the others have made a set with it, and before it has told them where its memory
// of the set is. An exchange needs no announcement of rank 2.
void a_set_whose_peer_does_not_show_its_memory() {
  for (const bool is_lost : {true, false}) {
    Config config = Config::from_environment();
    config.timeout_s = 5;
    Engines ranks({0, 0, 0}, config);
    ranks.settle();
    ranks[0].common.peers.tolerate_losses();
    std::vector<std::shared_ptr<Handle>> added;
    for (int rank = 0; rank < 3; ++rank)
      added.push_back(change_set(ranks[rank].scheduler, Opcode::kAddSet, {{0, 1, 2}}));
    ranks[2].poll();  // it announces, and then does nothing more
    const auto poll = [&] {
      for (int times = 0; times < 5; ++times) {
        ranks[1].poll();
        ranks[0].poll();
      }
    };
    poll();
    CHECK(added[0]->done() && added[1]->done());
    const auto layout =
        std::make_shared<Layout>(std::vector<TensorSpec>{{"w", DType::kFloat32, {4}}}, std::size_t{1} << 20);
    std::vector<float> values(layout->bytes() / sizeof(float), 1);
    auto* data = reinterpret_cast<std::byte*>(values.data());
    Request request = barrier_called("exchange", added[0]->set_id);
    request.opcode = Opcode::kExchange;
    request.exchange =
        std::make_shared<Exchange>(Exchange{layout, std::make_shared<topology::Ring>(3), data, data, false, false,
                                            std::make_shared<ReceiveBuffer>(ranks[0].transport->node_memory())});
    const auto call = ranks[0].scheduler.submit(std::move(request));
    poll();
    CHECK(!call->done());
    if (is_lost) {
      ranks.network().kill(2);
      CHECK_THROWS(Error, ranks[2].poll());
      ranks[0].failures.watch(ranks[0].in(0));
      poll();
      const std::string text = error_of<PeerLost>(*call);
      CHECK(text.find("rank 2") != std::string::npos, text);
    } else {
      try {
        ranks[0].failures.watch(ranks[0].in(6));
        CHECK(false && "no deadline");
      } catch (const Timeout& error) {
        CHECK(error.missing == std::vector<int>{2}, error.what());
      }
    }
  }
}

}  // namespace

int main() {
  ranks_may_submit_in_any_order(kTogether);
  ranks_may_submit_in_any_order(kApart);
  ranks_may_submit_in_any_order({0, 1, 0, 1, 2});
  nothing_runs_before_all_have_submitted();
  what_one_rank_sees_is_refused_at_once();
  a_set_whose_peer_does_not_show_its_memory();
  a_difference_fails_that_operation_alone();
  sets_may_be_spoken_of_early();
  sets_that_are_added_at_once_differ();
  messages_of_two_sets_are_told_apart();
  sets_of_two_coordinators_that_are_added_at_once_are_refused();
  a_limit_while_mapping_is_told();
  memory_of_a_rank_that_has_ended_is_not_used();
  the_gone_fail_what_waits_for_them();
  the_end_fails_everything();
  decisions_that_do_not_fit_are_refused();
  after_a_refused_removal_operations_start();
  a_transfer_that_cannot_begin_does_not_end_the_others(Opcode::kAllreduce);
  a_transfer_that_cannot_begin_does_not_end_the_others(Opcode::kAllgather);
  a_removal_in_the_middle_of_the_end_fails_once();
  exchanges_start_in_the_order_of_the_calls();
  return report();
}
