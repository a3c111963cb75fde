// The coordinator's bookkeeping: when an operation runs, in which order, and when it fails.
#include <limits>

#include "check.h"
#include "engine/negotiation.h"
#include "transport/transport.h"

using namespace sordino;

namespace {

Announcement say(const std::string& name, std::vector<std::int64_t> shape = {4}, Opcode opcode = Opcode::kAllreduce) {
  return {name, opcode, ReduceOp::kSum, 1, 1, 0, {DType::kFloat32}, {std::move(shape)}, {}};
}

const AwakeTime kNow{};

void runs_once_all_have_announced() {
  Negotiation talk({0, 3, 5}, 0);
  talk.announce(0, say("a"), kNow);
  talk.announce(0, say("b"), kNow);
  talk.announce(2, say("b"), kNow);
  CHECK(talk.decide().empty());
  CHECK(talk.waiting().size() == 2);
  talk.announce(1, say("b"), kNow);
  auto decisions = talk.decide();
  CHECK(decisions.size() == 1 && decisions[0].names[0] == "b" && decisions[0].verdict == Verdict::kRun);
  CHECK((decisions[0].participants == std::vector<int>{0, 1, 2}) && decisions[0].last == 3);
  CHECK(talk.waiting().size() == 1 && (talk.waiting()[0].missing == std::vector<int>{3, 5}));
  talk.announce(1, say("a"), kNow);
  talk.announce(2, say("a"), kNow);
  decisions = talk.decide();
  CHECK(decisions.size() == 1 && decisions[0].last == 5);
  CHECK(talk.waiting().empty());
}

void differences_are_named() {
  const auto differ = [](Announcement left, Announcement right) {
    Negotiation talk({0, 7}, 1 << 20);
    talk.announce(0, std::move(left), kNow);
    talk.announce(1, std::move(right), kNow);
    auto decisions = talk.decide();
    CHECK(decisions.size() == 1);
    return decisions[0].verdict == Verdict::kMismatch ? decisions[0].error : std::string();
  };
  CHECK(differ(say("x"), say("x")).empty());
  const std::string shape = differ(say("x", {4}), say("x", {2, 2}));
  CHECK(shape.find("'x'") != std::string::npos && shape.find("rank 0 and rank 7") != std::string::npos);
  CHECK(shape.find("[4] against [2, 2]") != std::string::npos);
  auto other = say("x");
  other.dtypes[0] = DType::kInt64;
  CHECK(differ(say("x"), other).find("float32 against int64") != std::string::npos);
  other = say("x");
  other.op = ReduceOp::kMin;
  CHECK(differ(say("x"), other).find("Sum against Min") != std::string::npos);
  other = say("x");
  other.postscale = 2;
  CHECK(differ(say("x"), other).find("postscale") != std::string::npos);
  other = say("x");
  other.root = 1;
  CHECK(differ(say("x"), other).find("root") != std::string::npos);
  CHECK(differ(say("x"), say("x", {4}, Opcode::kBroadcast)).find("allreduce against broadcast") != std::string::npos);
  CHECK(differ(say("x", {1, 3}, Opcode::kAllgather), say("x", {9, 3}, Opcode::kAllgather)).empty());
  CHECK(!differ(say("x", {1, 3}, Opcode::kAllgather), say("x", {1, 4}, Opcode::kAllgather)).empty());
}

void small_neighbors_are_fused() {
  Negotiation talk({0}, 64);
  for (const char* name : {"a", "b", "c", "d", "e"}) talk.announce(0, say(name), kNow);  // 16 bytes each
  auto other = say("f");
  other.op = ReduceOp::kMax;
  talk.announce(0, other, kNow);
  const auto decisions = talk.decide();
  CHECK(decisions.size() == 3);
  CHECK(decisions[0].names.size() == 4 && decisions[1].names.size() == 1 && decisions[2].names[0] == "f");
}

void joined_members_are_not_waited_for() {
  Negotiation talk({0, 1, 2}, 0);
  const Announcement join{"join", Opcode::kJoin, ReduceOp::kSum, 1, 1, 0, {}, {}, {}};
  talk.announce(0, say("a"), kNow);
  talk.announce(2, say("a"), kNow);
  CHECK(talk.decide().empty());
  talk.announce(1, join, kNow);  // this completes it
  auto decisions = talk.decide();
  CHECK(decisions.size() == 1 && (decisions[0].participants == std::vector<int>{0, 2}));
  for (const int member : {0, 2}) talk.announce(member, say("g", {1}, Opcode::kAllgather), kNow);
  decisions = talk.decide();
  CHECK(decisions.size() == 1 && decisions[0].verdict == Verdict::kMismatch);
  talk.announce(2, join, kNow);
  CHECK(talk.decide().empty());
  talk.announce(0, join, kNow);
  decisions = talk.decide();
  CHECK(decisions.size() == 1 && decisions[0].merged.last_rank == 0);  // rank 0 was last
  talk.announce(0, say("b"), kNow);
  CHECK(talk.decide().empty());  // a new round: no rank has joined
}

// A rank joins and leaves, so the join() of the others fails. Then no rank counts as joined.
void a_join_that_fails_is_over() {
  Negotiation talk({0, 1, 2}, 0);
  const Announcement join{"join", Opcode::kJoin, ReduceOp::kSum, 1, 1, 0, {}, {}, {}};
  for (const int member : {1, 2}) talk.announce(member, join, kNow);
  CHECK(talk.decide().empty());
  talk.note_left(2, {"rank 2, which has shut down", {2}});
  auto decisions = talk.decide();
  CHECK(decisions.size() == 1 && decisions[0].verdict == Verdict::kPeerLost);
  for (const char* name : {"a", "z"}) talk.announce(0, say(name), kNow);
  decisions = talk.decide();
  CHECK(decisions.size() == 2 && decisions[1].verdict == Verdict::kPeerLost);  // they need rank 2, too
  // The same holds if the operations are called before the join() has failed.
  Negotiation before({0, 1, 2}, 0);
  for (const int member : {1, 2}) before.announce(member, join, kNow);
  CHECK(before.decide().empty());
  before.note_left(2, {"rank 2, which has shut down", {2}});
  for (const char* name : {"a", "z"}) before.announce(0, say(name), kNow);
  CHECK(before.decide().size() == 3);
}

void the_gone_fail_what_waits_for_them() {
  Negotiation talk({4, 6}, 0);
  talk.announce(0, say("a"), kNow);
  talk.announce(1, say("b"), kNow);
  talk.note_left(1, {"rank 6, which has shut down", {6}});
  auto decisions = talk.decide();
  CHECK(decisions.size() == 2);  // a waits for the rank, and so would b
  for (const Decision& decision : decisions) {
    CHECK(decision.verdict == Verdict::kPeerLost && (decision.lost == std::vector<int>{6}));
    CHECK(decision.error.ends_with("needs rank 6, which has shut down"));
  }
  talk.announce(0, say("b"), kNow);
  decisions = talk.decide();  // it had announced b, but has left
  CHECK(decisions.size() == 1 && decisions[0].verdict == Verdict::kPeerLost);
}

void the_gone_name_those_whom_they_lost() {
  Negotiation talk({4, 6, 8}, 0);
  talk.announce(0, say("a"), kNow);
  talk.note_left(2, {"rank 8, which has shut down because of rank 5", {5}});
  talk.note_left(1, {"rank 6, which has shut down", {6, 5}});
  const auto decisions = talk.decide();
  CHECK(decisions.size() == 1 && (decisions[0].lost == std::vector<int>{6, 5}));
}

void messages_survive_the_wire_and_cuts_do_not() {
  Writer writer;
  say("name", {1, 2, 3}).write(writer);
  const Bytes bytes = writer.take();
  Reader reader(bytes);
  const Announcement back = Announcement::read(reader);
  CHECK(back.name == "name" && back.shapes[0].size() == 3 && back.bytes() == 24 && reader.empty());
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    Reader cut{std::span<const std::byte>(bytes).first(size)};
    CHECK_THROWS(TransportError, Announcement::read(cut));
  }
}

// Lists that have an entry for each rank take as many bytes for 1000 ranks as for 10.
void a_decision_does_not_grow_with_the_ranks() {
  const auto written = [](const Decision& decision) {
    Writer writer;
    decision.write(writer);
    return writer.take();
  };
  std::vector<std::size_t> sizes;
  for (const int members : {10, 1000}) {
    Decision decision;
    decision.names = {"name"};
    for (int member = 0; member < members; ++member) decision.participants.push_back(member);
    decision.merged.rows.assign(static_cast<std::size_t>(members) * members, 7);  // as of an all-to-all
    const Bytes bytes = written(decision);
    Reader reader(bytes);
    const Decision back = Decision::read(reader, members);
    CHECK(back.participants == decision.participants && back.merged.rows == decision.merged.rows && reader.empty());
    Reader of_fewer(bytes);
    CHECK_THROWS(TransportError, Decision::read(of_fewer, members - 1));
    sizes.push_back(bytes.size());
  }
  CHECK(sizes[0] == sizes[1], sizes[0], sizes[1]);
  // The whole list has a limit, not each run.
  Decision large;
  large.names = {"name"};
  for (int part = 0; part < 200; ++part) large.merged.rows.insert(large.merged.rows.end(), 1000, part % 2);
  const Bytes many = written(large);
  Reader reader(many);
  CHECK_THROWS(TransportError, Decision::read(reader, 2));
  // Any numbers survive, also at the ends of their range.
  using Limits = std::numeric_limits<std::int64_t>;
  for (const std::vector<std::int64_t>& rows :
       std::vector<std::vector<std::int64_t>>{{},
                                              {5},
                                              {5, 5},
                                              {1, 2, 4, 8, 7, 6},
                                              {Limits::min(), Limits::max(), 0, Limits::max()},
                                              {3, 3, 3, 3, 3, 3, 3}}) {
    Decision decision;
    decision.names = {"name"};
    decision.merged.rows = rows;
    const Bytes bytes = written(decision);
    Reader reader(bytes);
    CHECK(Decision::read(reader, 2).merged.rows == rows && reader.empty(), rows.size());
  }
}

// The operations have different participants, as some ranks have joined before others, so they are not fused.
void operations_of_other_participants_are_not_fused() {
  Negotiation talk({0, 3, 5}, std::size_t{1} << 20);
  for (const int member : {0, 1}) talk.announce(member, say("a"), kNow);
  for (const int member : {0, 2}) talk.announce(member, say("b"), kNow);
  for (const int member : {1, 2}) talk.announce(member, say("join", {4}, Opcode::kJoin), kNow);
  const auto decisions = talk.decide();
  CHECK(decisions.size() == 2);
  for (const Decision& decision : decisions)
    CHECK((decision.participants == std::vector{0, decision.names == std::vector<std::string>{"a"} ? 1 : 2}));
}

// Tags have space for thousands of sets, and then repeat.
void a_new_set_has_tags_of_its_own() {
  Negotiation talk({0, 1}, 0);
  const auto add = [&](std::vector<int> sets, int newest) {
    for (const int member : {0, 1}) {
      Announcement said = say("add", {4}, Opcode::kAddSet);
      said.known_sets.newest = newest;
      said.known_sets.ids = member == 1 ? sets : std::vector<int>{0};
      talk.announce(member, said, kNow);
    }
    const auto decisions = talk.decide();
    CHECK(decisions.size() == 1);
    return decisions.at(0).merged.set_id;
  };
  CHECK(add({0}, 0) == 1);
  CHECK(add({0}, 0) == 2);  // members may not have made the first yet
  for (const int newest : {kTagSets - 2, kTagSets - 1, kTagSets}) {
    const std::vector<int> sets{0, 1, 3, newest};
    const int id = add(sets, newest);
    CHECK(id > newest);
    for (const int set : sets) CHECK(tag_set_of(id) != tag_set_of(set), id, "and", set);
  }
  for (const int member : {0, 1}) {
    Announcement said = say("too many", {4}, Opcode::kAddSet);
    said.known_sets.ids.resize(kTagSets / 2);
    talk.announce(member, said, kNow);
  }
  CHECK(talk.decide().at(0).error.find("rank 0 has 4095 process sets already") != std::string::npos);
}

}  // namespace

int main() {
  runs_once_all_have_announced();
  differences_are_named();
  small_neighbors_are_fused();
  joined_members_are_not_waited_for();
  a_join_that_fails_is_over();
  the_gone_fail_what_waits_for_them();
  the_gone_name_those_whom_they_lost();
  messages_survive_the_wire_and_cuts_do_not();
  a_decision_does_not_grow_with_the_ranks();
  operations_of_other_participants_are_not_fused();
  a_new_set_has_tags_of_its_own();
  return sordino::test::report();
}
