// Members agree on one next epoch, whoever dies, falls silent or comes back meanwhile, in whatever order messages
// arrive.
#include <deque>
#include <memory>
#include <random>

#include "check.h"
#include "membership/agreement.h"

namespace sordino::membership {
namespace {

// Ranks that exchange messages through queues, of which a random one moves next.
class Ranks {
 public:
  Ranks(int size, unsigned seed) : random_(seed), alive_(static_cast<std::size_t>(size), true), queues_(size * size) {
    View all;
    for (int rank = 0; rank < size; ++rank) all.members.push_back(rank);
    for (int rank = 0; rank < size; ++rank) {
      ranks_.push_back(std::make_unique<Agreement>(all, rank, [this, rank, size](int to, const Bytes& message) {
        if (alive_[static_cast<std::size_t>(rank)])
          queues_[static_cast<std::size_t>(rank * size + to)].push_back(message);
      }));
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Agreement& operator[](int rank) { return *ranks_[static_cast<std::size_t>(rank)]; }
  bool alive(int rank) const { return alive_[static_cast<std::size_t>(rank)]; }
  int draw(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }

  void kill(int rank) { alive_[static_cast<std::size_t>(rank)] = false; }
  void tell_death(int rank, int to) {
    if (alive(to)) (*this)[to].bury(rank, "killed");
  }
  // Delivers one message, if there is any that `passes` lets through.
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
    Reader reader(message);
    (*this)[index % size()].receive(index / size(), reader);
    return true;
  }
  bool move() {
    return move([](int, int) { return true; });
  }
  // Until nothing moves, with those that were refused trying again.
  void settle() {
    for (int turn = 0; turn < 20; ++turn) {
      while (move()) {
      }
      for (int rank = 0; rank < size(); ++rank) {
        if (!alive(rank)) continue;
        (*this)[rank].retry();
        for (int other = 0; other < size(); ++other) {  // who has gone on tells those that it hears of
          if (!alive(other) || !(*this)[other].decided()) continue;
          const Bytes verdict = Agreement::verdict(*(*this)[other].decided());
          Reader reader(verdict);
          (*this)[rank].receive(other, reader);
        }
      }
    }
  }
  // What has been decided: the same wherever anything has.
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
  std::mt19937 random_;
  std::vector<bool> alive_;
  std::vector<std::unique_ptr<Agreement>> ranks_;
  std::vector<std::deque<Bytes>> queues_;
};

void one_death() {
  for (int size = 2; size <= 6; ++size) {
    for (int dead = 0; dead < size; ++dead) {
      Ranks ranks(size, 7);
      ranks.kill(dead);
      const int witness = dead == 0 ? 1 : 0;
      ranks[witness].count_tags(5);
      ranks.tell_death(dead, witness);  // the others hear it from this one
      ranks[witness].begin();
      ranks.settle();
      const auto view = ranks.decided();
      CHECK(view && view->epoch == 1 && view->first_tag == 5);
      CHECK(view && static_cast<int>(view->members.size()) == size - 1 && view->place_of(dead) < 0);
      for (int rank = 0; rank < size; ++rank) CHECK(rank == dead || ranks[rank].decided());
    }
  }
}

// Nobody is lost: an error made the ranks meet.
void nobody_lost() {
  Ranks ranks(4, 3);
  ranks[2].begin();
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members.size() == 4);
}

void who_cannot_work_together_is_parted() {
  Ranks ranks(5, 1);
  ranks[3].accuse(1, "its transfers fail");
  ranks[4].accuse(1, "its transfers fail");
  ranks[3].begin();
  ranks.settle();
  CHECK(ranks.decided() && ranks.decided()->members == (std::vector<int>{0, 2, 3, 4}));
  CHECK(ranks[1].decided());  // it learns that it is out
}

// The leader accuses when it has begun already.
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
  CHECK(ranks[1].decided() && ranks[1].decided()->members == (std::vector<int>{1, 2, 3}));
  ranks.settle();  // the link is whole again: the one that was cut off learns that it is out
  CHECK(ranks[0].decided() && ranks[0].decided()->place_of(0) < 0);
}

// Random deaths, silences that are errors, and messages in any order: never two decisions, and in the end one.
void whatever_happens(unsigned seed) {
  std::mt19937 random(seed);
  const int size = 2 + static_cast<int>(random() % 6);
  Ranks ranks(size, seed);
  std::vector<std::pair<int, int>> untold;  // deaths that somebody has yet to hear of
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
  nobody_lost();
  who_cannot_work_together_is_parted();
  a_late_accusation_counts();
  two_halves_stop();
  most_go_on();
  for (unsigned seed = 0; seed < 3000; ++seed) whatever_happens(seed);
  return sordino::test::report();
}
