// Small operations of all kinds between nodes, whose data travel in the messages of turns: results with the same bits
// as those of the negotiated operation, and ranks that are late, leave or stand still.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <set>

#include "check.h"
#include "collectives/node_blocks.h"
#include "one_shot_calls.h"
#include "topology/schedule.h"

using namespace sordino;
using namespace sordino::test;

namespace {

using Handles = std::vector<std::shared_ptr<Handle>>;
using std::chrono::milliseconds;

const std::vector<std::vector<int>> kLayouts{{0, 1},       {0, 0, 1, 1},          {0, 1, 0, 2},
                                             {0, 0, 0, 1}, {0, 0, 1, 1, 2, 3, 4}, {0, 1, 2, 3, 4}};

struct Kind {
  Opcode opcode;
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1;
  std::int64_t rows = 5;  // of two elements
  int without = 0;        // in an all-to-all: the first ranks, which get nothing
};
const std::vector<Kind> kKinds{{Opcode::kAllgather},
                               {Opcode::kAllgather, DType::kFloat32, ReduceOp::kSum, 1, 300},
                               {Opcode::kAllgather, DType::kUInt8, ReduceOp::kSum, 1, 0},
                               {Opcode::kBroadcast},
                               {Opcode::kBroadcast, DType::kFloat32, ReduceOp::kSum, 1, 8000},
                               {Opcode::kAlltoall},
                               {Opcode::kAlltoall, DType::kFloat32, ReduceOp::kSum, 1, 200},
                               {Opcode::kReducescatter},
                               {Opcode::kReducescatter, DType::kFloat16, ReduceOp::kAverage, 1, 100},
                               {Opcode::kReducescatter, DType::kBFloat16, ReduceOp::kAverage, 0.3, 3},
                               {Opcode::kReducescatter, DType::kFloat32, ReduceOp::kProduct, 1.1, 1000},
                               {Opcode::kBarrier},
                               {Opcode::kAllgather, DType::kFloat32, ReduceOp::kSum, 1, 1500},
                               {Opcode::kAlltoall, DType::kFloat32, ReduceOp::kSum, 1, 2000},
                               {Opcode::kAlltoall, DType::kFloat32, ReduceOp::kSum, 1, 2000, 2}};

// One rank's operation, with inputs that depend on its rank and on the turn.
class Work {
 public:
  Work(Engine& engine, const Kind& kind, int rank, int ranks, int turn, std::string name = "work")
      : engine_(&engine), kind_(kind) {
    request_.name = std::move(name);
    request_.opcode = kind.opcode;
    request_.op = kind.op;
    request_.prescale = kind.prescale;
    request_.root = ranks - 1;
    std::int64_t rows = kind.rows;
    if (kind.opcode == Opcode::kAllgather) rows += rank % 3;
    if (kind.opcode == Opcode::kAlltoall) {
      for (int to = 0; to < ranks; ++to)
        request_.splits.push_back(to < kind.without ? 0 : (rank + 2 * to) % 4 * kind.rows / 5);
      rows = std::accumulate(request_.splits.begin(), request_.splits.end(), std::int64_t{0});
    }
    input_.resize(static_cast<std::size_t>(rows) * 2 * size_of(kind.dtype));
    for (std::size_t index = 0; index < input_.size(); ++index) {
      const std::size_t mixed = index * 37 + static_cast<std::size_t>(rank * 11 + turn * 5);
      // The high byte of a number has a small exponent, so that sums and products are finite.
      const bool is_high = index % size_of(kind.dtype) == size_of(kind.dtype) - 1;
      input_[index] = static_cast<std::byte>(is_high ? 0x3b + mixed % 5 : mixed);
    }
    if (kind.opcode == Opcode::kBroadcast) output_ = input_;
    if (kind.opcode != Opcode::kBarrier)
      request_.tensors.push_back({kind.dtype, {rows, 2}, input_.data(), output_.empty() ? nullptr : output_.data()});
  }
  std::shared_ptr<Handle> submit() { return handle_ = engine_->scheduler.submit(Request(request_)); }
  bool done() const { return handle_ && handle_->done(); }
  bool succeeded() const { return done() && !handle_->error; }
  Bytes result() const {
    if (kind_.opcode == Opcode::kBroadcast) return output_;
    if (handle_->results.empty()) return {};
    const Result& found = handle_->results.front();
    return {found.data.get(), found.data.get() + found.bytes};
  }

 private:
  Engine* engine_;
  Kind kind_;
  Request request_;
  Bytes input_, output_;
  std::shared_ptr<Handle> handle_;
};

std::vector<std::unique_ptr<Work>> work_of(Engines& ranks, const Kind& kind, int turn,
                                           const std::string& name = "work") {
  std::vector<std::unique_ptr<Work>> all;
  for (int rank = 0; rank < ranks.size(); ++rank)
    all.push_back(std::make_unique<Work>(ranks[rank], kind, rank, ranks.size(), turn, name));
  return all;
}

// Runs the operation on all ranks. Returns their results.
std::vector<Bytes> run(Engines& ranks, const Kind& kind, int turn, const std::string& name = "work") {
  const auto all = work_of(ranks, kind, turn, name);
  for (const auto& one : all) one->submit();
  ranks.settle();
  std::vector<Bytes> results;
  for (const auto& one : all) {
    CHECK(one->succeeded());
    results.push_back(one->result());
  }
  return results;
}

std::uint64_t in_one_shot(Engines& ranks) { return ranks[0].common.traffic.one_shot.load(); }

void repeats_have_the_bits_of_negotiated_operations() {
  for (const auto& nodes : kLayouts) {
    for (const Kind& kind : kKinds) {
      Engines ranks(nodes), others(nodes);
      run(ranks, kind, 0);
      for (int turn = 1; turn < 4; ++turn) {
        const auto negotiated = run(others, kind, turn, "work." + std::to_string(turn));
        const auto repeated = run(ranks, kind, turn);
        for (std::size_t rank = 0; rank < repeated.size(); ++rank)
          CHECK(repeated[rank] == negotiated[rank], "opcode", static_cast<int>(kind.opcode), "rank", rank);
        CHECK(in_one_shot(ranks) == static_cast<std::uint64_t>(turn), "opcode", static_cast<int>(kind.opcode));
      }
      CHECK(in_one_shot(others) == 0);
    }
  }
}

// Between two nodes, a message has only what the members of the other node take.
void a_link_carries_what_its_node_needs() {
  struct Expected {
    Opcode opcode;
    std::uint64_t of_first, of_second;  // bytes that the leader of a node sends
  };
  for (const auto& [opcode, of_first, of_second] :
       {Expected{Opcode::kAllgather, (30 + 31) * 8, (32 + 30) * 8}, Expected{Opcode::kAlltoall, 36 * 8, 36 * 8},
        Expected{Opcode::kReducescatter, (7 + 7) * 8, (8 + 8) * 8}, Expected{Opcode::kBroadcast, 0, 30 * 8}}) {
    Engines ranks({0, 0, 1, 1});
    const Kind kind{opcode, DType::kFloat32, ReduceOp::kSum, 1, 30};
    run(ranks, kind, 0);
    std::vector<std::uint64_t> before;
    for (int rank = 0; rank < 4; ++rank) before.push_back(ranks[rank].common.traffic.across.load());
    run(ranks, kind, 1);
    for (int rank = 0; rank < 4; ++rank) {
      const std::uint64_t sent = ranks[rank].common.traffic.across.load() - before[static_cast<std::size_t>(rank)];
      CHECK(sent == (rank == 0 ? of_first : rank == 2 ? of_second : 0), "rank", rank, sent);
    }
  }
}

void what_is_too_large_agrees_first() {
  const auto shots = [](const std::vector<int>& nodes, Opcode opcode, std::int64_t rows) {
    Engines ranks(nodes);
    const Kind kind{opcode, DType::kUInt8, ReduceOp::kSum, 1, rows};
    for (int turn = 0; turn < 3; ++turn) run(ranks, kind, turn);
    return in_one_shot(ranks);
  };
  constexpr std::int64_t kRows = OneShotSlots::kMostBytes / 2;  // of a whole slot
  CHECK(shots({0, 0, 1, 1}, Opcode::kAllgather, kRows - 2) == 2);
  CHECK(shots({0, 0, 1, 1}, Opcode::kAllgather, kRows + 1) == 0);
  CHECK(shots({0, 0, 1, 1, 2}, Opcode::kAllgather, kRows - 2) == 0);       // all results together
  CHECK(shots({0, 0, 0, 0, 0, 0, 0, 1}, Opcode::kAlltoall, 10'240) == 0);  // the results on the first node
  CHECK(shots({0, 0, 0, 0, 0, 0, 0, 1}, Opcode::kAlltoall, 5'000) == 2);
  CHECK(shots({0, 0, 1, 1, 2}, Opcode::kBroadcast, kRows) == 2);
  CHECK(shots({0, 0, 1, 1, 2}, Opcode::kReducescatter, kRows) == 2);
}

void poll(Engines& ranks, Time now, int but = -1) {
  for (int rank = 0; rank < ranks.size(); ++rank) {
    if (rank == but) continue;
    ranks[rank].scheduler.decline(now);
    ranks[rank].poll(now);
  }
}

// A rank comes after it has declined, or after it has stood still while others waited.
void a_late_rank_makes_all_negotiate() {
  for (const bool stands_still : {false, true}) {
    for (const Kind& kind : {kKinds[0], kKinds[3], kKinds[5], kKinds[7]}) {
      for (int late = 0; late < 5; ++late) {
        Engines ranks({0, 0, 1, 1, 2});
        const auto expected = run(ranks, kind, 0);
        const auto all = work_of(ranks, kind, 0);
        for (int rank = 0; rank < 5; ++rank) {
          if (rank != late) all[static_cast<std::size_t>(rank)]->submit();
        }
        Time now = std::chrono::steady_clock::now();
        for (int times = 0; times < 60; ++times, now += milliseconds(25)) poll(ranks, now, stands_still ? late : -1);
        all[static_cast<std::size_t>(late)]->submit();
        for (int times = 0; times < 60; ++times, now += milliseconds(1)) poll(ranks, now);
        for (std::size_t rank = 0; rank < 5; ++rank)
          CHECK(all[rank]->succeeded() && all[rank]->result() == expected[rank], "late", late, "rank", rank);
        run(ranks, kind, 1);
        const std::uint64_t before = in_one_shot(ranks);
        run(ranks, kind, 2);
        CHECK(in_one_shot(ranks) == before + 1);
      }
    }
  }
}

// A rank that does nothing for a while still finds its result, which the leader must not have overwritten.
void a_slow_rank_of_the_node_gets_its_result() {
  for (const Kind& kind : {kKinds[1], kKinds[4], kKinds[6], kKinds[8]}) {
    Engines ranks({0, 0, 1, 1});
    const auto expected = run(ranks, kind, 0, "first");
    run(ranks, kind, 1, "second");
    const auto first = work_of(ranks, kind, 0, "first"), second = work_of(ranks, kind, 1, "second");
    for (const auto& one : first) one->submit();
    Time now = std::chrono::steady_clock::now();
    for (int times = 0; times < 2; ++times) poll(ranks, now);  // all have entered
    for (int times = 0; times < 20; ++times) poll(ranks, now, 1);
    for (const std::size_t rank : {0U, 2U, 3U}) CHECK(first[rank]->succeeded());
    for (const std::size_t rank : {0U, 2U, 3U}) second[rank]->submit();
    for (int times = 0; times < 60; ++times, now += milliseconds(25)) poll(ranks, now, 1);
    for (int times = 0; times < 20; ++times) poll(ranks, now);
    CHECK(first[1]->succeeded() && first[1]->result() == expected[1]);
    second[1]->submit();
    for (int times = 0; times < 60; ++times, now += milliseconds(1)) poll(ranks, now);
    for (const auto& one : second) CHECK(one->succeeded());
  }
}

// A rank of the node has seen that the next turn has no result. It does not publish data of yet another turn over those
// that the slow rank has yet to take.
void data_stay_until_a_slow_rank_has_taken_them() {
  const Kind large{Opcode::kAllgather, DType::kFloat32, ReduceOp::kSum, 1, 6000};
  const Kind medium{Opcode::kAllgather, DType::kFloat32, ReduceOp::kSum, 1, 1500};
  Engines ranks({0, 0, 0, 1, 1});
  const auto expected = run(ranks, large, 0, "first");
  const auto expected_last = run(ranks, medium, 2, "third");
  run(ranks, medium, 1, "second");
  const auto first = work_of(ranks, large, 0, "first"), second = work_of(ranks, medium, 1, "second");
  const auto third = work_of(ranks, medium, 2, "third");
  for (const auto& one : first) one->submit();
  Time now = std::chrono::steady_clock::now();
  for (int times = 0; times < 2; ++times) poll(ranks, now);  // all have entered
  for (int times = 0; times < 20; ++times) poll(ranks, now, 1);
  CHECK(!first[1]->done());
  for (const std::size_t rank : {0U, 2U, 3U, 4U}) CHECK(first[rank]->succeeded());
  for (const std::size_t rank : {0U, 2U, 3U, 4U}) second[rank]->submit();
  for (int times = 0; times < 60; ++times, now += milliseconds(25)) poll(ranks, now, 1);
  third[2]->submit();
  for (int times = 0; times < 20; ++times) poll(ranks, now, 1);
  for (int times = 0; times < 20; ++times) poll(ranks, now);
  CHECK(first[1]->succeeded() && first[1]->result() == expected[1]);
  second[1]->submit();
  for (const std::size_t rank : {0U, 1U, 3U, 4U}) third[rank]->submit();
  for (int times = 0; times < 60; ++times, now += milliseconds(1)) poll(ranks, now);
  for (std::size_t rank = 0; rank < 5; ++rank)
    CHECK(second[rank]->succeeded() && third[rank]->succeeded() && third[rank]->result() == expected_last[rank]);
}

// The other ranks have the data that the leaving rank has published or sent.
void a_rank_that_has_its_result_may_leave() {
  for (const Kind& kind : {kKinds[0], kKinds[3], kKinds[5], kKinds[7]}) {
    for (int leaves = 0; leaves < 5; ++leaves) {
      Engines ranks({0, 0, 1, 1, 2});
      const auto expected = run(ranks, kind, 0);
      const auto all = work_of(ranks, kind, 0);
      for (const auto& one : all) one->submit();
      const Time now = std::chrono::steady_clock::now();
      for (int times = 0; times < 100 && !all[static_cast<std::size_t>(leaves)]->done(); ++times) {
        for (int rank = 4; rank >= 0; --rank) ranks[rank].poll(now);
      }
      for (int peer = 0; peer < 5; ++peer) {
        if (peer != leaves) ranks[leaves].transport->post(peer, goodbye());
      }
      for (int times = 0; times < 20; ++times) poll(ranks, now, leaves);
      for (std::size_t rank = 0; rank < 5; ++rank)
        CHECK(all[rank]->succeeded() && all[rank]->result() == expected[rank], "leaves", leaves, "rank", rank);
    }
  }
}

void a_message_of_another_size_is_refused() {
  Engines ranks({0, 1});
  run(ranks, kKinds[0], 0);
  const auto all = work_of(ranks, kKinds[0], 1);
  all[0]->submit();
  ranks[0].poll();
  Signature what;
  what.opcode = Opcode::kAllgather;
  what.dtype = DType::kFloat32;
  what.shape = {5, 2};
  what.root = 1;
  const auto repeat = ranks[0].scheduler.find(0, "work", what);
  CHECK(repeat && repeat->blocks && repeat->blocks->bytes() == 11 * 8);
  const Bytes few(8);
  Writer message;
  message.put(Message::kOneShot).put(0).put(std::uint64_t{1}).put(repeat->number << 1).put(std::uint64_t{0});
  ranks[1].transport->post(0, message.put(false).put(-1).put_rest(few).take());
  CHECK_THROWS(TransportError, ranks[0].poll());
}

// combined_before() returns the members whose vectors a member has combined before a round.
void members_know_what_others_have_combined() {
  for (int size = 1; size <= 17; ++size) {
    std::vector<std::set<int>> known;
    for (int member = 0; member < size; ++member) known.push_back({member});
    for (int round = 0; round < 8; ++round) {
      const auto before = known;
      for (int member = 0; member < size; ++member) {
        for (const auto& step : topology::doubling(size, member)) {
          if (step.round != round || !step.gives) continue;
          const std::vector<int> held = topology::combined_before(size, member, round);
          CHECK(std::set<int>(held.begin(), held.end()) == before[static_cast<std::size_t>(member)], "size", size);
          known[static_cast<std::size_t>(step.partner)].insert(held.begin(), held.end());
        }
      }
    }
    for (const auto& one : known) CHECK(static_cast<int>(one.size()) == size);
  }
}

}  // namespace

int main() {
  repeats_have_the_bits_of_negotiated_operations();
  a_link_carries_what_its_node_needs();
  what_is_too_large_agrees_first();
  a_late_rank_makes_all_negotiate();
  a_slow_rank_of_the_node_gets_its_result();
  data_stay_until_a_slow_rank_has_taken_them();
  a_rank_that_has_its_result_may_leave();
  a_message_of_another_size_is_refused();
  members_know_what_others_have_combined();
  return report();
}
