// All-reduce in one shot between nodes, polled by hand: the messages of leaders, ranks that decline, and ranks that
// have left or stand still.
#include <set>

#include "check.h"
#include "collectives/node_blocks.h"
#include "one_shot_calls.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using std::chrono::milliseconds;

// Returns a call of every rank, with values that differ by rank.
std::vector<Call> calls_of(Engines& ranks, const std::string& name) {
  std::vector<Call> calls;
  for (int rank = 0; rank < ranks.size(); ++rank) calls.emplace_back(ranks[rank], name, static_cast<float>(rank + 1));
  return calls;
}

void what_was_done_before_needs_one_message_of_a_node() {
  for (const std::vector<int>& nodes : {std::vector{0, 1}, {0, 0, 1, 1}, {0, 1, 0, 2}, {0, 0, 1, 2, 3, 4, 5}}) {
    Engines ranks(nodes);
    agree(ranks, {"x"});
    const auto sum = static_cast<float>(ranks.size() * (ranks.size() + 1) / 2);
    for (std::uint64_t turn = 1; turn < 6; ++turn) {
      std::vector<Call> calls = calls_of(ranks, "x");
      for (Call& call : calls) CHECK(call.enter() && !call.over());
      ranks.settle();
      for (Call& call : calls) CHECK(call.over() && call.collect() && call.has(sum));
      CHECK(ranks[0].common.traffic.one_shot.load() == turn);
    }
  }
}

void numbers_that_differ_agree_on_nothing() {
  for (const std::vector<int>& nodes : {std::vector{0, 1, 2}, {0, 0, 1, 1}}) {
    for (int odd = 0; odd < static_cast<int>(nodes.size()); ++odd) {
      Engines ranks(nodes);
      agree(ranks, {"x", "y"});
      std::vector<Call> calls = calls_of(ranks, "x");
      calls[static_cast<std::size_t>(odd)] = Call(ranks[odd], "y", 1);
      for (Call& call : calls) CHECK(call.enter());
      ranks.settle();
      for (Call& call : calls) CHECK(call.over() && !call.collect());
    }
  }
}

// A submission enters the turn of the calls that wait. An unnamed one has used up a number, and the calls have not, so
// all ranks negotiate. This holds on whatever node the rank is, and whichever other ranks have come.
void who_has_submitted_it_enters_too() {
  for (const std::vector<int>& nodes : {std::vector{0, 1, 2}, {0, 0, 1, 1}, {0, 0, 1, 1, 2}}) {
    for (const std::string name : {"x", "noname."}) {
      for (int odd = 0; odd < static_cast<int>(nodes.size()); ++odd) {
        Engines ranks(nodes);
        agree(ranks, {name});
        std::vector<Call> calls = calls_of(ranks, name);
        std::vector<std::shared_ptr<Handle>> handles{calls[static_cast<std::size_t>(odd)].submit()};
        const Time now = std::chrono::steady_clock::now();
        for (int rank = 0; rank < ranks.size(); ++rank)
          CHECK(rank == odd || calls[static_cast<std::size_t>(rank)].enter());
        for (int times = 0; times < 10; ++times) {  // at once, without waiting for a late rank
          for (int rank = 0; rank < ranks.size(); ++rank) {
            ranks[rank].scheduler.decline(now);
            ranks[rank].poll(now);
          }
        }
        for (int rank = 0; rank < ranks.size(); ++rank) {
          Call& call = calls[static_cast<std::size_t>(rank)];
          if (rank == odd) continue;
          CHECK(call.over() && call.collect() == (name == "x"), "rank", rank, "odd", odd);
          if (name != "x") handles.push_back(call.submit());
        }
        ranks.settle();
        for (const auto& handle : handles) CHECK(handle->done() && !handle->error);
        for (const Call& call : calls) CHECK(call.has(static_cast<float>(ranks.size() * (ranks.size() + 1) / 2)));
      }
    }
  }
}

// Even a rank that only waits for its turn in the tree does not wait long.
void nobody_waits_long_for_a_node_that_does_nothing() {
  for (int waiting = 0; waiting < 5; ++waiting) {
    Engines ranks({0, 1, 2, 3, 4});
    agree(ranks, {"x"});
    Call call(ranks[waiting], "x", 1);
    CHECK(call.enter());
    Time now = std::chrono::steady_clock::now();
    for (int times = 0; times < 100; ++times, now += milliseconds(1)) {
      for (int rank = 0; rank < ranks.size(); ++rank) {
        ranks[rank].scheduler.decline(now);
        ranks[rank].poll(now);
      }
    }
    CHECK(call.over() && !call.collect(), "rank", waiting);
  }
}

// A rank that does nothing hears from its leader that others wait, and declines by itself.
void nobody_waits_long_for_a_rank_of_the_node() {
  Engines ranks({0, 0, 1});
  agree(ranks, {"x"});
  std::vector<Call> calls = calls_of(ranks, "x");
  for (const int rank : {0, 2}) CHECK(calls[static_cast<std::size_t>(rank)].enter());
  Time now = std::chrono::steady_clock::now();
  for (int times = 0; times < 50; ++times, now += milliseconds(1)) {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      ranks[rank].scheduler.decline(now);
      ranks[rank].poll(now);
    }
  }
  for (const int rank : {0, 2}) {
    Call& call = calls[static_cast<std::size_t>(rank)];
    CHECK(call.over() && !call.collect(), "rank", rank);
  }
}

// The rank itself does not decline, but its leader does so for it.
void a_node_does_not_wait_for_a_rank_that_stands_still() {
  Engines ranks({0, 0, 1, 1});
  agree(ranks, {"x"});
  std::vector<Call> calls = calls_of(ranks, "x");
  for (const int rank : {0, 2, 3}) CHECK(calls[static_cast<std::size_t>(rank)].enter());
  const Time now = std::chrono::steady_clock::now();
  for (const Time time : {now, now + std::chrono::seconds(2)}) {
    for (int times = 0; times < 5; ++times) {
      for (const int rank : {0, 2, 3}) ranks[rank].poll(time);
    }
    for (const int rank : {0, 2, 3}) CHECK(calls[static_cast<std::size_t>(rank)].over() == (time > now));
  }
  for (const int rank : {0, 2, 3}) CHECK(!calls[static_cast<std::size_t>(rank)].collect());
  // When the rank wakes, that turn is over.
  agree(ranks, {"x"});
  std::vector<Call> next = calls_of(ranks, "x");
  for (Call& call : next) CHECK(call.enter());
  ranks.settle();
  for (Call& call : next) CHECK(call.over() && call.collect() && call.has(10));
}

// A leader does not write the outcome of a turn to a slot from which a slow rank has yet to read the outcome of two
// turns before.
void a_slow_rank_of_the_node_gets_its_result() {
  Engines ranks({0, 0, 1});
  agree(ranks, {"x", "y", "z"});
  std::vector<Call> calls = calls_of(ranks, "x");
  for (Call& call : calls) CHECK(call.enter());
  ranks.settle();
  for (const int rank : {0, 2}) CHECK(calls[static_cast<std::size_t>(rank)].collect());
  Time now = std::chrono::steady_clock::now();
  for (const char* name : {"y", "z"}) {  // rank 2 declines both
    Call next(ranks[0], name, 1);
    CHECK(next.enter());
    for (int times = 0; times < 60; ++times, now += milliseconds(10)) {
      for (const int rank : {0, 2}) {
        ranks[rank].scheduler.decline(now);
        ranks[rank].poll(now);
      }
    }
    CHECK(next.over() == (name == std::string("y")));
    if (next.over()) CHECK(!next.collect());
  }
  CHECK(calls[1].over() && calls[1].collect() && calls[1].has(6));
}

// The time for which ranks have waited for each other starts at zero in every turn.
void an_earlier_turn_is_long_ago() {
  Engines ranks({0, 0, 1, 1});
  agree(ranks, {"x"});
  Time now = std::chrono::steady_clock::now();
  const auto poll = [&] {
    for (int times = 0; times < 10; ++times) {
      for (int rank = 0; rank < ranks.size(); ++rank) ranks[rank].poll(now);
    }
  };
  for (int turn = 0; turn < 3; ++turn, now += std::chrono::seconds(2)) {
    std::vector<Call> calls = calls_of(ranks, "x");
    for (const int leader : {0, 2}) CHECK(calls[static_cast<std::size_t>(leader)].enter());
    poll();  // both leaders know that a rank waits
    for (const int other : {1, 3}) CHECK(calls[static_cast<std::size_t>(other)].enter());
    poll();
    for (Call& call : calls) CHECK(call.over() && call.collect() && call.has(10), "turn", turn);
  }
}

// Lets one rank say goodbye, and the others hear of it.
void let_leave(Engines& ranks, int leaves) {
  for (int peer = 0; peer < ranks.size(); ++peer) {
    if (peer != leaves) ranks[leaves].transport->post(peer, goodbye());
  }
  for (int times = 0; times < 20; ++times) {
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank != leaves) ranks[rank].poll();
    }
  }
}

// The other ranks have the data that the leaving rank has published or sent.
void who_has_its_result_may_leave() {
  for (int leaves = 0; leaves < 5; ++leaves) {
    Engines ranks({0, 0, 1, 1, 2});
    agree(ranks, {"x"});
    std::vector<Call> calls = calls_of(ranks, "x");
    for (Call& call : calls) CHECK(call.enter());
    Call& first = calls[static_cast<std::size_t>(leaves)];
    for (int peer = 0; peer < 5; ++peer) {
      for (int other = 0; other < peer; ++other) {
        if (peer != leaves && other != leaves) ranks.network().cut(peer, other, true);
      }
    }
    for (int times = 0; times < 20; ++times) {
      for (int rank = 0; rank < ranks.size(); ++rank) ranks[rank].poll();
    }
    for (int peer = 0; peer < 5; ++peer) {
      for (int other = 0; other < peer; ++other) ranks.network().cut(peer, other, false);
    }
    while (!first.over()) {
      for (int rank = 0; rank < ranks.size(); ++rank) ranks[rank].poll();
    }
    CHECK(first.collect() && first.has(15));
    let_leave(ranks, leaves);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      Call& call = calls[static_cast<std::size_t>(rank)];
      if (rank != leaves) CHECK(call.over() && call.collect() && call.has(15), "rank", rank, "leaves", leaves);
      CHECK(rank == leaves || !Call(ranks[rank], "x", 1).enter());
    }
  }
}

void nobody_waits_for_who_has_left() {
  for (int leaves = 0; leaves < 5; ++leaves) {
    Engines ranks({0, 0, 1, 1, 2});
    agree(ranks, {"x"});
    std::vector<Call> calls = calls_of(ranks, "x");
    for (int rank = 0; rank < ranks.size(); ++rank)
      CHECK(rank == leaves || calls[static_cast<std::size_t>(rank)].enter());
    let_leave(ranks, leaves);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      Call& call = calls[static_cast<std::size_t>(rank)];
      if (rank != leaves) CHECK((call.over() || call.in_vain()) && !call.collect(), "rank", rank, "leaves", leaves);
    }
  }
}

// A rank that leaves takes its entry back until its leader has begun the turn. After that all have the result.
void a_rank_that_leaves_takes_its_entry_back_until_the_turn_has_begun() {
  for (int leaves = 0; leaves < 4; ++leaves) {
    for (const bool begun : {false, true}) {
      Engines ranks({0, 0, 1, 1});
      agree(ranks, {"x"});
      std::vector<Call> calls = calls_of(ranks, "x");
      std::vector<std::shared_ptr<Handle>> handles(4);
      const auto enter = [&](int rank) {
        handles[static_cast<std::size_t>(rank)] = calls[static_cast<std::size_t>(rank)].submit();
        ranks[rank].scheduler.announce();
      };
      const int leader = leaves / 2 * 2, fellow = leaves ^ 1;
      enter(leaves);
      if (begun) {
        enter(fellow);
        CHECK(ranks[leader].scheduler.relay(std::chrono::steady_clock::now()));
      }
      ranks[leaves].scheduler.withdraw();
      CHECK(ranks[leaves].scheduler.settled() != begun);
      for (int rank = 0; rank < 4; ++rank) {
        if (!handles[static_cast<std::size_t>(rank)]) enter(rank);
      }
      for (int times = 0; times < 8; ++times) {
        for (int rank = 0; rank < 4; ++rank) ranks[rank].poll();
      }
      for (const auto& handle : handles) CHECK(handle->done() == begun);
      for (int rank = 0; rank < 4; ++rank)
        CHECK(calls[static_cast<std::size_t>(rank)].has(begun ? 10 : static_cast<float>(rank + 1)));
    }
  }
}

// All ranks name the leader, however far from it they are.
void a_leader_that_stands_still_is_named() {
  Config config = Config::from_environment();
  config.timeout_s = 30;
  for (int stuck = 0; stuck < 5; ++stuck) {
    Engines ranks({0, 1, 2, 3, 4, 4, 4}, config);
    agree(ranks, {"x"});
    std::vector<Call> calls = calls_of(ranks, "x");
    Time now = std::chrono::steady_clock::now();
    for (int times = 0; times < 10; ++times, now += milliseconds(300)) {
      for (int rank = 0; rank < ranks.size(); ++rank) {
        if (rank != stuck && times == 0) CHECK(calls[static_cast<std::size_t>(rank)].enter());
        if (rank != stuck) ranks[rank].poll(now);
      }
    }
    for (int rank = 0; rank < ranks.size(); ++rank) {
      if (rank == stuck) continue;
      try {
        ranks[rank].failures.watch(ranks[rank].in(31));
        CHECK(false);
      } catch (const Timeout& error) {
        CHECK(error.missing == std::vector<int>{stuck} && error.operation == "allreduce.x", "rank", rank, error.what());
      }
    }
  }
}

std::vector<std::shared_ptr<Handle>> barrier_of_all(Engines& ranks) {
  std::vector<std::shared_ptr<Handle>> handles;
  for (int rank = 0; rank < ranks.size(); ++rank)
    handles.push_back(ranks[rank].scheduler.submit(barrier_called("barrier")));
  return handles;
}

// A barrier may be over on another node before a rank has mapped the memory of its own node. Messages of the next turn
// wait until the rank has mapped it.
void messages_wait_for_the_memory_of_the_node() {
  Engines ranks({0, 0, 1, 1});
  ranks.network().cut(2, 3, true);
  const auto first = barrier_of_all(ranks);
  ranks.settle();
  CHECK(first[0]->done() && first[1]->done() && !first[2]->done());
  const auto second = ranks[0].scheduler.submit(barrier_called("barrier"));
  const auto third = ranks[1].scheduler.submit(barrier_called("barrier"));
  ranks.settle();
  ranks.network().cut(2, 3, false);
  ranks.settle();
  CHECK(first[2]->done() && first[3]->done() && !second->done());
  ranks[2].scheduler.submit(barrier_called("barrier"));
  const auto last = ranks[3].scheduler.submit(barrier_called("barrier"));
  ranks.settle();
  CHECK(second->done() && third->done() && last->done() && !second->error);
  for (const auto& handles = barrier_of_all(ranks); const auto& handle : handles) {
    ranks.settle();
    CHECK(handle->done() && !handle->error);
  }
}

// A member that leaves before the memory of its node is mapped takes part in no turn.
void who_has_left_early_is_known() {
  Engines ranks({0, 0, 1, 1});
  ranks.network().cut(2, 3, true);
  ranks.settle();
  ranks[2].common.peers.note_left(0, "has shut down");
  ranks[2].scheduler.note_left(0);
  ranks.network().cut(2, 3, false);
  ranks.settle();
  CHECK(ranks[2].scheduler.sets().at(0)->one_shot()->closed());
  CHECK(!ranks[3].scheduler.sets().at(0)->one_shot()->closed());
}

void what_makes_no_sense_is_refused() {
  Engines ranks({0, 0, 1, 1});
  agree(ranks, {"x"});
  const auto message = [](std::uint64_t turn, std::size_t bytes) {
    const Bytes data(bytes);
    return Writer()
        .put(Message::kOneShot)
        .put(0)
        .put(turn)
        .put(OneShot::Number{9})
        .put(std::uint64_t{0})
        .put(false)
        .put(-1)
        .put_rest(data)
        .take();
  };
  const auto is_refused = [&](int from, int to, const Bytes& bytes) {
    ranks[from].transport->post(to, bytes);
    try {
      ranks[to].poll();
    } catch (const TransportError&) {
      return true;
    }
    return false;
  };
  CHECK(is_refused(0, 3, message(1, 4)));                                     // sender is not a leader
  CHECK(is_refused(3, 0, message(1, 4)));                                     // receiver is not a leader
  CHECK(is_refused(1, 0, message(1, 4)));                                     // of the same node
  CHECK(is_refused(2, 0, message(3, 4)) && is_refused(2, 0, message(0, 4)));  // of another turn
  CHECK(is_refused(2, 0, message(1, NodeBlocks::kMostBytes + 1)));
  CHECK(!is_refused(2, 0, message(1, 4)) && is_refused(2, 0, message(1, 4)));  // twice
  Engines others({0, 1});
  agree(others, {"x"});
  std::vector<Call> calls = calls_of(others, "x");
  CHECK(calls[0].enter());
  const auto number = others[0].scheduler.find(0, "allreduce.x", kSum)->number << 1;
  const Bytes few(8);
  Writer short_one;
  short_one.put(Message::kOneShot).put(0).put(std::uint64_t{1}).put(number).put(std::uint64_t{0}).put(false).put(-1);
  others[1].transport->post(0, short_one.put_rest(few).take());
  CHECK_THROWS(TransportError, others[0].poll());  // fewer bytes than this rank has
}

}  // namespace

int main() {
  what_was_done_before_needs_one_message_of_a_node();
  numbers_that_differ_agree_on_nothing();
  who_has_submitted_it_enters_too();
  nobody_waits_long_for_a_node_that_does_nothing();
  nobody_waits_long_for_a_rank_of_the_node();
  a_node_does_not_wait_for_a_rank_that_stands_still();
  a_slow_rank_of_the_node_gets_its_result();
  an_earlier_turn_is_long_ago();
  who_has_its_result_may_leave();
  nobody_waits_for_who_has_left();
  a_rank_that_leaves_takes_its_entry_back_until_the_turn_has_begun();
  a_leader_that_stands_still_is_named();
  messages_wait_for_the_memory_of_the_node();
  who_has_left_early_is_known();
  what_makes_no_sense_is_refused();
  return report();
}
