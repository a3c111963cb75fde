// Members agree on one next epoch, whatever ranks die, fall silent or come back meanwhile, and in whatever order
// messages arrive.
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "membership/consensus.h"
#include "membership/membership.h"
#include "transport/sim/sim.h"

namespace sordino::membership {
namespace {

// Ranks that exchange messages through queues. A random queue moves next.
class Ranks {
 public:
  Ranks(int size, unsigned seed) : random_(seed), alive_(static_cast<std::size_t>(size), true), queues_(size * size) {
    View all;
    for (int rank = 0; rank < size; ++rank) all.members.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Consensus>(all, rank, [this, rank, size](int to, const Bytes& message) {
        if (alive_[static_cast<std::size_t>(rank)])
          queues_[static_cast<std::size_t>(rank * size + to)].push_back(message);
      }));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Consensus& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  bool alive(int rank) const { return alive_[static_cast<std::size_t>(rank)]; }
  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }

  // From now on some messages are lost, as when a rank is still in an earlier epoch.
  void lose_some() { loses_ = true; }
  void kill(int rank) { alive_[static_cast<std::size_t>(rank)] = false; }
  void tell_death(int rank, int to) {
    if (alive(to)) (*this)[to].bury(rank, "killed");
  }
  // Delivers one message for which `passes` is true, if there is one.
  template <class Passes>
  bool move(Passes passes) {
    std::vector<int> waiting;
    for (int index = 0; index < size() * size(); ++index) {
      const bool there = !queues_[static_cast<std::size_t>(index)].empty() && alive(index % size());
      if (there && passes(index / size(), index % size())) waiting.push_back(index);
    }
    if (waiting.empty()) return false;
    const int index = waiting[static_cast<std::size_t>(draw(static_cast<int>(waiting.size())))];
    auto& queue = queues_[static_cast<std::size_t>(index)];
    const Bytes message = queue.front();
    queue.pop_front();
    if (loses_ && draw(3) == 0) return true;
    Reader reader(message);
    (*this)[index % size()].receive(index / size(), reader);
    return true;
  }
  bool move() {
    return move([](int, int) { return true; });
  }
  // Delivers all messages in flight from one rank to another, and no others.
  void pass(int from, int to) {
    for (std::deque<Bytes> messages = std::exchange(queue(from, to), {}); !messages.empty(); messages.pop_front()) {
      Reader reader(messages.front());
      (*this)[to].receive(from, reader);
    }
  }
  // Delivers all messages in flight from one rank to another, and then the answers.
  void pass_and_return(int from, int to) {
    pass(from, to);
    pass(to, from);
  }
  // Drops all messages in flight from a rank.
  void lose(int from) {
    for (int to = 0; to < size(); ++to) queue(from, to).clear();
  }
  // Returns the number of messages in flight from one rank to another.
  std::size_t sent(int from, int to) { return queue(from, to).size(); }
  // Delivers messages until nothing moves; ranks that were refused try again.
  void settle() {
    for (int turn = 0; turn < 20; ++turn) {
      while (move()) {
      }
      for (int rank = 0; rank < size(); ++rank) {
        if (!alive(rank)) continue;
        (*this)[rank].retry();
        for (int other = 0; other < size(); ++other) {  // ranks that have decided tell the others
          if (!alive(other) || !(*this)[other].decided()) continue;
          const Bytes verdict = Consensus::verdict(*(*this)[other].decided());
          Reader reader(verdict);
          (*this)[rank].receive(other, reader);
        }
      }
    }
  }
  // Returns the decision, and checks that it is the same on all ranks that have one.
  std::optional<View> decided() {
    std::optional<View> all;
    for (auto& one : ranks_) {
      if (!one->decided()) continue;
      if (all) CHECK(*all == *one->decided());
      all = one->decided();
    }
    return all;
  }

 private:
  std::deque<Bytes>& queue(int from, int to) { return queues_[static_cast<std::size_t>(from * size() + to)]; }

  std::mt19937 random_;
  bool loses_ = false;
  std::vector<bool> alive_;
  std::vector<std::unique_ptr<Consensus>> ranks_;
  std::vector<std::deque<Bytes>> queues_;
};

void one_death() {
  for (int size = 2; size <= 6; ++size) {
    for (int dead = 0; dead < size; ++dead) {
      Ranks ranks(size, 7);
      ranks.kill(dead);
      const int witness = dead == 0 ? 1 : 0;
      ranks[witness].count_tags(5);
      ranks.tell_death(dead, witness);  // the others hear it from the witness
      ranks[witness].begin();
      ranks.settle();
      const auto view = ranks.decided();
      CHECK(view && view->epoch == 1 && view->first_tag == 5);
      CHECK(view && static_cast<int>(view->members.size()) == size - 1 && view->place_of(dead) < 0);
      for (int rank = 0; rank < size; ++rank) CHECK(rank == dead || ranks[rank].decided());
    }
  }
}

// A rank that begins because of others' messages reports the loss at once, so it has to know of it by then.
void who_begins_knows_why() {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Ranks ranks(4, seed);
    ranks.kill(3);
    ranks.tell_death(3, 1);  // rank 0, which leads, hears it from rank 1
    ranks[1].begin();
    while (ranks.move()) {
      for (int rank = 0; rank < 3; ++rank) CHECK(!ranks[rank].begun() || ranks[rank].blamed().contains(3), seed, rank);
    }
    CHECK(ranks.decided());
  }
}

// No rank is lost: an error made the ranks meet.
void nobody_lost() {
  Ranks ranks(4, 3);
  ranks[2].begin();
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members.size() == 4);
}

void who_cannot_work_together_is_parted() {
  Ranks ranks(5, 1);
  ranks[3].accuse(1, "it does not come");
  ranks[4].accuse(1, "it does not come");
  ranks[3].begin();
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{0, 2, 3, 4}));
  CHECK(ranks[1].decided());  // it learns that it is left out
}

// The leader accuses a rank after it has begun.
void a_late_accusation_counts() {
  Ranks ranks(3, 2);
  ranks[0].begin();
  ranks[0].accuse(2, "it does not come");
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{0, 1}));
}

void two_halves_stop() {
  Ranks ranks(4, 5);
  const auto passes = [](int from, int to) { return from / 2 == to / 2; };
  for (int rank = 0; rank < 4; ++rank) {
    for (int other = 0; other < 4; ++other) {
      if (rank / 2 != other / 2) ranks[rank].silence(other, "cut off");
    }
    ranks[rank].begin();
  }
  while (ranks.move(passes)) {
  }
  CHECK(!ranks.decided());
  for (int rank = 0; rank < 4; ++rank) CHECK(!ranks[rank].has_quorum());
}

void most_go_on() {
  Ranks ranks(4, 5);
  const auto passes = [](int from, int to) { return (from == 0) == (to == 0); };
  for (int other = 1; other < 4; ++other) {
    ranks[0].silence(other, "cut off");
    ranks[other].silence(0, "cut off");
  }
  for (int rank = 0; rank < 4; ++rank) ranks[rank].begin();
  while (ranks.move(passes)) {
  }
  CHECK(!ranks[0].has_quorum() && !ranks[0].decided());
  CHECK(ranks[1].has_quorum());
  CHECK(ranks[1].decided() && ranks[1].decided()->members == (std::vector<int>{1, 2, 3}));
  ranks.settle();  // the link works again: the rank that was cut off learns that it is left out
  CHECK(ranks[0].decided() && ranks[0].decided()->place_of(0) < 0);
}

// A decision is final, whatever the next leader has heard.
void no_leader_proposes_without_most_promises() {
  Ranks ranks(5, 1);
  ranks[0].silence(3, "slow");
  ranks[0].silence(4, "slow");
  ranks[0].begin();
  for (const int rank : {1, 2}) ranks.pass_and_return(0, rank);  // they promise
  for (const int rank : {1, 2}) ranks.pass_and_return(0, rank);  // and accept
  CHECK(ranks[0].decided() && ranks[0].decided()->members == (std::vector<int>{0, 1, 2}));
  ranks.lose(0);
  for (const int rank : {0, 1, 2}) ranks[3].silence(rank, "slow");
  ranks[3].begin();
  ranks.pass_and_return(3, 4);
  CHECK(!ranks[3].has_quorum());
  for (const int rank : {1, 2}) ranks.pass_and_return(3, rank);
  for (const int rank : {1, 2}) ranks.pass_and_return(3, rank);
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{0, 1, 2}));
}

// Two leaders are lost, and ranks that promise the third have accepted different views.
void the_view_of_the_highest_ballot_is_taken_up() {
  Ranks ranks(5, 1);
  ranks[0].silence(3, "slow");
  ranks[0].begin();
  for (const int rank : {1, 2, 4}) ranks.pass_and_return(0, rank);
  ranks.pass(0, 4);  // only rank 4 accepts 0, 1, 2 and 4
  ranks.lose(0);
  ranks.kill(0);
  ranks[1].silence(4, "slow");
  ranks.tell_death(0, 1);
  for (const int rank : {2, 3}) ranks.pass_and_return(1, rank);
  for (const int rank : {2, 3}) ranks.pass_and_return(1, rank);
  CHECK(ranks[1].decided() && ranks[1].decided()->members == (std::vector<int>{1, 2, 3}));
  ranks.lose(1);
  ranks.kill(1);
  ranks.tell_death(1, 2);
  for (const int rank : {3, 4}) ranks.pass_and_return(2, rank);
  ranks.settle();
  CHECK(ranks[2].decided() && ranks[2].decided()->members == (std::vector<int>{1, 2, 3}));
  ranks.decided();
}

void who_is_alone_decides_at_once() {
  Ranks before(2, 1), after(2, 1);
  before[0].bury(1, "killed");
  before[0].begin();
  after[0].begin();
  after[0].bury(1, "killed");
  for (Ranks* ranks : {&before, &after}) {
    CHECK((*ranks)[0].decided() && (*ranks)[0].decided()->members == std::vector<int>{0});
  }
}

// Once the missed rank counts as silent, the leader continues without a further message.
void a_leader_does_not_wait_for_who_is_missed() {
  Ranks ranks(3, 1);
  ranks[0].begin();
  ranks.pass_and_return(0, 1);
  CHECK(ranks.sent(0, 1) == 0);
  ranks[0].silence(2, "slow");
  CHECK(ranks.sent(0, 1) == 1);
  ranks.pass_and_return(0, 1);
  CHECK(ranks[0].decided() && ranks[0].decided()->members == (std::vector<int>{0, 1}));
}

void who_cannot_work_with_the_leader_leads() {
  Ranks ranks(3, 1);
  ranks[1].begin();
  ranks.lose(1);
  ranks[1].accuse(0, "it does not come");
  CHECK(ranks.sent(1, 2) == 1);
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->place_of(0) < 0);
}

// The members follow from the number of accusations of each rank, and from the ranks that each rank waits for.
void who_is_at_fault_is_left_out() {
  using Ranks = std::vector<int>;
  const auto kept = [](int size, const std::map<int, int>& accused, const Waits& waits) {
    Ranks ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return members_without_fault(ranks, accused, waits);
  };
  CHECK(kept(4, {}, {}) == (Ranks{0, 1, 2, 3}));
  CHECK(kept(4, {}, {{0, {1}}, {1, {2}}}) == (Ranks{0, 1, 2, 3}));  // waits alone are no fault
  CHECK(kept(4, {{2, 1}}, {{0, {2}}}) == (Ranks{0, 1, 3}));
  CHECK(kept(4, {{0, 1}, {2, 1}}, {}) == (Ranks{1, 3}));
  CHECK(kept(8, {{5, 1}, {6, 1}, {7, 1}}, {{0, {5, 6, 7}}, {1, {5, 6, 7}}}) == (Ranks{0, 1, 2, 3, 4}));
  // Rank 1 does not come to an operation, because it waits for rank 2, which waits for rank 3.
  CHECK(kept(4, {{1, 1}}, {{0, {1}}, {1, {2}}}) == (Ranks{0, 1, 3}));
  CHECK(kept(4, {{1, 3}}, {{0, {1}}, {1, {2}}, {2, {3}}}) == (Ranks{0, 1, 2}));
  CHECK(kept(4, {{0, 1}}, {{0, {2}}, {1, {0}}, {3, {0}}}) == (Ranks{0, 1, 3}));  // it coordinates the operation
  // Circles.
  CHECK(kept(3, {{1, 1}}, {{0, {1}}, {1, {0}}}) == (Ranks{0, 2}));
  CHECK(kept(4, {{0, 2}, {1, 1}}, {{0, {1}}, {1, {0}}, {2, {0}}}) == (Ranks{1, 2, 3}));
  CHECK(kept(3, {{0, 1}, {1, 1}, {2, 1}}, {{0, {1}}, {1, {2}}, {2, {0}}}) == (Ranks{0, 1}));
  // Rank 7 is not there: a rank that waits for it is excused, and so is a rank that waits for that rank.
  CHECK(kept(4, {{1, 1}}, {{1, {7}}}) == (Ranks{0, 1, 2, 3}));
  CHECK(kept(4, {{1, 1}, {3, 1}}, {{1, {2}}, {2, {7}}}) == (Ranks{0, 1, 2}));
  CHECK(kept(4, {{7, 1}}, {}) == (Ranks{0, 1, 2, 3}));
  CHECK(kept(2, {{0, 1}, {1, 1}}, {}) == (Ranks{0}));  // one rank stays
}

// Other ranks wait for a rank that itself may wait for another one. Its promise contains the ranks that it waits for.
void a_promise_tells_for_whom_its_rank_waits() {
  for (int culprit = 1; culprit < 3; ++culprit) {
    Ranks ranks(4, 1);
    ranks[0].set_waits({{0, {1}}, {3, {1}}});
    if (culprit == 2) ranks[1].set_waits({{1, {2}}});
    ranks[0].accuse(1, "it does not come");
    ranks[0].begin();
    ranks.settle();
    CHECK(ranks.decided() && ranks.decided()->members.size() == 3 && ranks.decided()->place_of(culprit) < 0);
  }
}

// Rank 0 coordinates an operation, and does not come to it.
void a_leader_leaves_itself_out() {
  for (int size = 2; size <= 5; ++size) {
    Ranks ranks(size, 1);
    ranks[0].accuse(0, "it does not come");
    ranks[0].begin();
    ranks.settle();
    CHECK(ranks.decided() && static_cast<int>(ranks.decided()->members.size()) == size - 1);
    CHECK(ranks.decided()->place_of(0) < 0 && ranks[0].decided() && ranks[0].blamed().empty());
  }
}

// The leader has no privilege: it is left out if another rank accuses it.
void who_waits_for_the_leader_stays() {
  for (int accuser = 1; accuser < 4; ++accuser) {
    Ranks ranks(4, 1);
    ranks[accuser].accuse(0, "it does not come");
    ranks[accuser].begin();
    ranks.settle();
    CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{1, 2, 3}), accuser);
  }
}

// A leader repeats lost messages, even if no rank refuses it; without that it would wait forever.
void what_is_lost_is_sent_again() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const int size = 2 + static_cast<int>(seed) % 5;
    Ranks ranks(size, seed);
    ranks.lose_some();
    ranks[ranks.draw(size)].begin();
    ranks.settle();
    CHECK(ranks.decided() && static_cast<int>(ranks.decided()->members.size()) == size);
  }
  Ranks ranks(3, 1);
  for (int rank = 0; rank < 3; ++rank) ranks[rank].begin();
  ranks.lose(0);
  ranks[0].retry();
  CHECK(ranks.sent(0, 1) == 1 && ranks.sent(0, 2) == 1);
  ranks.pass_and_return(0, 1);
  ranks[0].retry();
  CHECK(ranks.sent(0, 1) == 0 && ranks.sent(0, 2) == 2);  // a rank that has answered is not asked again
  ranks.pass_and_return(0, 2);
  ranks.lose(0);
  ranks[0].retry();
  CHECK(ranks.sent(0, 1) == 1 && ranks.sent(0, 2) == 1);
  ranks.pass_and_return(0, 2);
  CHECK(ranks[0].decided() && ranks[0].decided()->members.size() == 3);
  Ranks others(3, 1);
  others[2].begin();
  others.lose(2);
  others[2].retry();
  CHECK(others.sent(2, 0) == 1 && others.sent(2, 1) == 0);
  others.pass(2, 0);
  CHECK(others[0].begun());
}

void deaths_are_told_on() {
  Ranks ranks(4, 1);
  ranks[0].begin();
  while (ranks.sent(0, 1) > 0) ranks.pass(0, 1);
  for (int rank = 0; rank < 4; ++rank) ranks.lose(rank);
  ranks[0].bury(3, "killed");
  ranks.pass(0, 1);
  CHECK(ranks[1].blamed().contains(3) && !ranks[2].blamed().contains(3));
  ranks.lose(0);
  ranks.pass(1, 2);
  CHECK(ranks[2].blamed().contains(3) && ranks[2].blamed().at(3) == "killed");
}

void nobody_is_told_of_itself_or_of_strangers() {
  Ranks ranks(4, 1);
  for (const int rank : {0, 9}) {
    ranks[0].bury(rank, "killed");
    ranks[0].silence(rank, "slow");
    if (rank != 0) ranks[0].accuse(rank, "it does not come");
  }
  CHECK(ranks[0].blamed().empty());
  ranks[0].bury(1, "killed");
  ranks[0].silence(1, "slow");
  ranks[0].silence(2, "slow");
  ranks[0].accuse(3, "it does not come");
  CHECK(!ranks[0].is_silent(1) && ranks[0].is_silent(2));
  CHECK(ranks[0].blamed() == (std::map<int, std::string>{{1, "killed"}, {2, "slow"}, {3, "it does not come"}}));
  ranks[0].hear(2);
  CHECK(!ranks[0].is_silent(2) && ranks[0].blamed().size() == 2);
  CHECK(!ranks[0].begun() && ranks.sent(0, 2) == 0 && ranks.sent(0, 3) == 0);  // facts alone start nothing
  ranks[1].bury(0, "killed");
  ranks[1].begin();
  ranks[2].begin();
  ranks.pass(1, 2);
  ranks.pass(2, 3);
  ranks.pass(3, 0);  // rank 0 reads that it is dead
  CHECK(ranks[3].blamed().contains(0) && !ranks[0].blamed().contains(0));
}

// Such a rank takes no part in later ballots. The next leader must ask it for the decision.
void who_has_decided_answers_nothing() {
  Ranks ranks(3, 1);
  ranks[0].silence(2, "slow");
  ranks[0].begin();
  for (int turn = 0; turn < 2; ++turn) ranks.pass_and_return(0, 1);
  CHECK(ranks[0].decided());
  ranks.lose(0);
  for (const int rank : {0, 1}) ranks[2].silence(rank, "slow");
  ranks[2].begin();
  ranks.pass(2, 0);
  CHECK(ranks.sent(0, 1) == 0 && ranks.sent(0, 2) == 0);
  ranks[0].accuse(1, "it does not come");
  CHECK(ranks.sent(0, 1) == 0 && ranks.sent(0, 2) == 0);
  CHECK(!ranks[1].decided());
  const Bytes verdict = Consensus::verdict(*ranks[0].decided());
  Reader reader(verdict);
  ranks[2].receive(0, reader);
  CHECK(ranks[2].decided() == ranks[0].decided());
  Ranks others(3, 1);  // none of them has begun
  Reader again(verdict);
  others[2].receive(0, again);
  CHECK(others[2].decided() == ranks[0].decided() && others[2].begun());
}

void the_leader_tells_the_others() {
  Ranks ranks(4, 9);
  for (int rank = 0; rank < 4; ++rank) ranks[rank].count_tags((5 * rank) % 4);
  ranks[0].begin();
  while (ranks.move()) {
  }
  for (int rank = 0; rank < 4; ++rank) CHECK(ranks[rank].decided() && ranks[rank].decided()->first_tag == 3);
}

// The last rank has promised the rank before it a higher ballot than the first rank's first ballot.
void let_a_rival_begin(Ranks& ranks) {
  const int size = ranks.size();
  for (int rank = 0; rank < size - 2; ++rank) ranks[size - 2].silence(rank, "slow");
  ranks[size - 2].begin();
  ranks.pass(size - 2, size - 1);
  for (int rank = 0; rank < size; ++rank) ranks.lose(rank);
}

void who_is_refused_tries_again() {
  Ranks ranks(3, 1);
  let_a_rival_begin(ranks);
  ranks[0].begin();
  ranks.pass(0, 1);  // rank 1 has been asked, and is asked again only in another ballot
  ranks.pass_and_return(0, 2);
  CHECK(ranks.sent(0, 1) == 0 && ranks.sent(0, 2) == 0);  // it waits until retry()
  ranks.pass(1, 0);
  ranks[0].retry();
  CHECK(ranks.sent(0, 1) == 1 && ranks.sent(0, 2) == 1);
  ranks[1].hear(0);
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members.size() == 3);
}

// A promise is for one ballot. It does not count for a later one, whether it arrives before or after its beginning.
void promises_are_of_one_ballot() {
  for (const bool late : {false, true}) {
    Ranks ranks(4, 1);
    let_a_rival_begin(ranks);
    ranks[0].begin();
    ranks.pass(0, 1);
    if (!late) ranks.pass(1, 0);
    ranks.pass_and_return(0, 3);
    ranks[0].retry();
    if (late) ranks.pass(1, 0);
    ranks.pass_and_return(0, 2);
    ranks.pass_and_return(0, 3);
    CHECK(ranks.sent(0, 2) == 0 && ranks.sent(0, 3) == 0);  // rank 0 waits for another promise
    ranks.pass_and_return(0, 1);
    CHECK(ranks.sent(0, 2) == 1 && ranks.sent(0, 3) == 1);
    ranks.settle();
    CHECK(ranks.decided() && ranks.decided()->members.size() == 4);
  }
}

void acceptances_are_of_one_ballot() {
  Ranks ranks(5, 1);
  ranks[0].begin();
  for (const int rank : {1, 2, 3, 4}) ranks.pass_and_return(0, rank);
  ranks.pass_and_return(0, 1);  // rank 1 accepts
  for (const int rank : {0, 1, 2, 3}) ranks[4].silence(rank, "slow");
  ranks.pass(4, 2);             // rank 2 promises a higher ballot
  ranks.pass_and_return(0, 2);  // and refuses
  CHECK(!ranks[0].decided());
  ranks.lose(4);
  ranks[0].retry();
  for (const int rank : {1, 2, 3, 4}) ranks.pass_and_return(0, rank);
  ranks.pass_and_return(0, 2);
  CHECK(!ranks[0].decided());  // two of five
  ranks.pass_and_return(0, 3);
  CHECK(ranks[0].decided());
}

// A leader that has promised another leader refuses its own proposal. That takes no message from another rank.
void a_leader_refuses_itself() {
  Ranks ranks(3, 1);
  ranks[0].begin();
  for (const int rank : {1, 2}) ranks.pass(0, rank);
  ranks[1].silence(0, "slow");
  ranks.pass(1, 0);
  ranks.pass(2, 0);
  ranks.lose(0);
  ranks[0].retry();
  CHECK(ranks.sent(0, 1) == 1 && ranks.sent(0, 2) == 1);
  ranks[1].hear(0);
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members.size() == 3);
}

void who_leads_again_begins_anew() {
  Ranks ranks(3, 1);
  ranks[1].silence(0, "slow");
  ranks[1].begin();
  ranks[1].hear(0);
  ranks[0].begin();
  ranks.pass(0, 1);
  ranks.lose(1);
  ranks[1].silence(0, "slow");
  CHECK(ranks.sent(1, 2) == 1);
}

void who_promises_and_dies_is_left_out() {
  Ranks ranks(4, 1);
  ranks[0].begin();
  ranks.pass_and_return(0, 3);
  ranks[0].bury(3, "killed");
  ranks.settle();
  CHECK(ranks[0].decided() && ranks[0].decided()->members == (std::vector<int>{0, 1, 2}));
}

// Members are chosen so that few ranks have trouble with each other, and are numbered by rank.
void members_are_in_order() {
  Ranks ranks(5, 1);
  for (const int rank : {1, 2}) ranks[rank].accuse(4, "it does not come");
  ranks[0].begin();
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{0, 1, 2, 3}));
}

// A message after the decision is answered with the decision, which is not answered.
void who_has_agreed_falls_still() {
  std::vector<std::shared_ptr<Membership>> ranks;
  for (auto& transport : sim::Network({0, 1, 2}).transports())
    ranks.push_back(std::make_shared<Membership>(std::move(transport), 1000.0));
  ranks[0]->begin();
  int turns = 0;
  for (bool moved = true; moved && turns < 100; ++turns) {
    moved = false;
    for (const auto& one : ranks) moved |= one->poll(one->view().epoch, [](int, std::span<const std::byte>) {});
  }
  CHECK(turns < 100);
  for (const auto& one : ranks) CHECK(one->view().epoch == 1 && one->view().members.size() == 3);
}

// The first two ranks agree on an epoch that includes the third, and meanwhile hear that the third has ended. No rank
// tells them again, and the third answers nothing.
void who_has_died_is_not_asked_in_the_next_epoch() {
  std::vector<std::shared_ptr<Membership>> ranks;
  for (auto& transport : sim::Network({0, 1, 2}).transports())
    ranks.push_back(std::make_shared<Membership>(std::move(transport), 1000.0));
  const auto poll = [&](std::size_t rank) {
    return ranks[rank]->poll(ranks[rank]->view().epoch, [](int, std::span<const std::byte>) {});
  };
  ranks[0]->begin();
  for (const std::size_t rank : {1, 2, 0, 1}) poll(rank);  // two promise, and one of them accepts
  for (const std::size_t rank : {0, 1}) ranks[rank]->left(2);
  poll(0);
  CHECK(ranks[0]->view().epoch == 1 && ranks[0]->view().members.size() == 3);
  for (int turn = 0; turn < 10; ++turn) {
    for (const std::size_t rank : {0, 1}) poll(rank);
  }
  for (const std::size_t rank : {0, 1})
    CHECK(ranks[rank]->view().epoch == 2 && ranks[rank]->view().members == (std::vector<int>{0, 1}));
}

// Random deaths, silences that are errors, and messages in any order: there are never two decisions, and in the end
// there is one.
void whatever_happens(unsigned seed) {
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 6);
  Ranks ranks(size, seed);
  std::vector<std::pair<int, int>> untold;  // deaths that a rank has yet to hear of
  int living = size;
  ranks[ranks.draw(size)].begin();
  for (int turn = 0; turn < 200; ++turn) {
    const int dice = ranks.draw(40);
    const int one = ranks.draw(size), other = ranks.draw(size);
    if (dice == 0 && living > 1 && ranks.alive(one)) {
      ranks.kill(one);
      --living;
      for (int rank = 0; rank < size; ++rank) untold.emplace_back(one, rank);
    } else if (dice == 1 && ranks.alive(one) && one != other) {
      ranks[one].silence(other, "slow");
    } else if (dice == 2) {
      if (ranks.alive(one)) ranks[one].hear(other);
    } else if (dice == 3) {
      if (ranks.alive(one)) ranks[one].retry();
    } else if (dice < 8 && !untold.empty()) {
      const auto [dead, to] = untold.back();
      untold.pop_back();
      ranks.tell_death(dead, to);
    } else {
      ranks.move();
    }
    ranks.decided();
  }
  for (const auto& [dead, to] : untold) ranks.tell_death(dead, to);
  for (int rank = 0; rank < size; ++rank) {
    for (int other = 0; other < size && ranks.alive(rank); ++other) ranks[rank].hear(other);
  }
  ranks.settle();
  CHECK(ranks.decided());
  for (int rank = 0; rank < size; ++rank) {
    if (ranks.alive(rank)) ranks[rank].begin();
  }
  ranks.settle();
  const auto view = ranks.decided();
  for (int rank = 0; rank < size; ++rank) CHECK(!ranks.alive(rank) || ranks[rank].decided());
  CHECK(view && !view->members.empty());
}

}  // namespace
}  // namespace sordino::membership

int main() {
  using namespace sordino::membership;
  one_death();
  who_begins_knows_why();
  nobody_lost();
  who_cannot_work_together_is_parted();
  a_late_accusation_counts();
  who_is_at_fault_is_left_out();
  a_promise_tells_for_whom_its_rank_waits();
  a_leader_leaves_itself_out();
  who_waits_for_the_leader_stays();
  two_halves_stop();
  most_go_on();
  no_leader_proposes_without_most_promises();
  the_view_of_the_highest_ballot_is_taken_up();
  who_is_alone_decides_at_once();
  a_leader_does_not_wait_for_who_is_missed();
  who_cannot_work_with_the_leader_leads();
  what_is_lost_is_sent_again();
  deaths_are_told_on();
  nobody_is_told_of_itself_or_of_strangers();
  who_has_decided_answers_nothing();
  the_leader_tells_the_others();
  who_is_refused_tries_again();
  promises_are_of_one_ballot();
  acceptances_are_of_one_ballot();
  a_leader_refuses_itself();
  who_leads_again_begins_anew();
  who_promises_and_dies_is_left_out();
  members_are_in_order();
  who_has_died_is_not_asked_in_the_next_epoch();
  who_has_agreed_falls_still();
  for (unsigned seed = 0; seed < 3000; ++seed) whatever_happens(seed);
  return sordino::test::report();
}
