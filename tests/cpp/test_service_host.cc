// The host of services: which messages reach which service, which ranks hear of events, and how long a closed service
// is kept.
#include <set>

#include "check.h"
#include "engine/service_host.h"
#include "engines.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr int kNumber = 3;

// Service that notes all calls.
class Notes : public Service {
 public:
  void receive(int from, Reader& reader) override { messages.push_back(std::to_string(from) + ": " + reader.text()); }
  bool advance(Time) override {
    ++advanced;
    return moves;
  }
  void lost(int rank) override { gone.push_back(rank); }
  void end(std::exception_ptr why) override {
    ended = true;
    try {
      std::rethrow_exception(why);
    } catch (const std::exception& error) {
      reason = error.what();
    }
  }
  bool settled() const override { return is_settled; }

  std::vector<std::string> messages;
  std::vector<int> gone;
  std::string reason;
  int advanced = 0;
  bool moves = false, ended = false, is_settled = true;
};

Bytes said(const std::string& text) { return Writer().put(text).take(); }

void messages_reach_the_service_of_that_number() {
  Engines ranks({0, 0, 1});
  const auto notes = std::make_shared<Notes>(), other = std::make_shared<Notes>();
  ranks[0].services.open(kNumber, notes);
  ranks[0].services.open(kNumber + 1, other);
  ranks[1].services.post(kNumber, 0, said("first"));
  ranks[1].services.post(kNumber, 0, said("second"));
  ranks[1].services.post(kNumber + 2, 0, said("for nobody"));
  ranks.settle();
  ranks[2].services.post(kNumber, 0, said("third"));
  ranks.settle();
  CHECK((notes->messages == std::vector<std::string>{"1: first", "1: second", "2: third"}));
  CHECK(other->messages.empty());
  ranks[2].common.peers.note_left(0, "has shut down");
  CHECK(ranks[2].services.has_left(0) && !ranks[2].services.has_left(1));
  ranks[2].services.post(kNumber, 0, said("to who has left"));
  ranks.settle();
  CHECK(notes->messages.size() == 3);
}

void all_are_moved_on_and_hear_of_losses() {
  Engines ranks({0, 1});
  ServiceHost& host = ranks[0].services;
  CHECK(!host.any() && !host.advance({}));
  const auto still = std::make_shared<Notes>(), busy = std::make_shared<Notes>();
  host.open(1, still);
  host.open(2, busy);
  CHECK(host.any() && !host.advance({}));
  busy->moves = true;
  CHECK(host.advance({}) && still->advanced == 2 && busy->advanced == 2);
  ranks[0].failures.note_left(1, true, "has shut down");
  CHECK((still->gone == std::vector<int>{1}) && (busy->gone == std::vector<int>{1}));
  host.wake();
  CHECK(ranks[0].wakes == 1);
}

void a_closed_one_is_lost_to_the_others_and_kept_while_it_is_touched() {
  Engines ranks({0, 1});
  auto mine = std::make_shared<Notes>();
  const auto theirs = std::make_shared<Notes>();
  mine->is_settled = false;
  ranks[0].services.open(kNumber, mine);
  ranks[1].services.open(kNumber, theirs);
  ranks[0].services.close(kNumber, true);
  ranks[0].services.close(kNumber, true);  // a second call does nothing
  CHECK(mine->ended && !ranks[0].services.any());
  ranks.settle();
  CHECK((theirs->gone == std::vector<int>{0}));
  ranks[1].services.post(kNumber, 0, said("too late"));
  ranks.settle();
  CHECK(mine->messages.empty());
  // The service is kept while transfers may access its memory, and for a second in which node peers may be reading it.
  Notes& notes = *mine;
  const std::weak_ptr<Notes> kept = std::exchange(mine, nullptr);
  const Time closed = std::chrono::steady_clock::now();
  Time now = closed;
  const auto advance = [&](std::chrono::milliseconds time) {
    for (const Time end = now + time; now < end;) ranks[0].common.clock.tick(now += std::chrono::milliseconds(100));
    ranks[0].services.advance(now);
  };
  notes.is_settled = true;
  advance(std::chrono::milliseconds(500));
  CHECK(!kept.expired());
  notes.is_settled = false;
  advance(std::chrono::seconds(5));
  CHECK(!kept.expired());
  notes.is_settled = true;
  advance(std::chrono::milliseconds(100));
  CHECK(kept.expired());
  ranks[1].services.close(kNumber, false);
  CHECK(!ranks[0].poll());
}

void the_end_of_the_world_ends_them() {
  Engines ranks({0, 1});
  const auto before = std::make_shared<Notes>(), after = std::make_shared<Notes>();
  ranks[0].services.open(1, before);
  ranks[0].failures.fail(std::make_exception_ptr(Error("over")), false);
  CHECK(before->ended && before->reason == "over");
  ranks[0].services.open(2, after);
  CHECK(after->ended && after->reason == "over");
}

// A process set's tags have other upper bits, and successive worlds give out different tags.
void tags_are_their_own() {
  Engines ranks({0});
  ServiceHost& host = ranks[0].services;
  std::set<Tag> tags;
  for (int turn = 0; turn < 1000; ++turn) tags.insert(host.next_tag());
  CHECK(tags.size() == 1000 && host.tags() == 1000);
  for (const Tag tag : tags) CHECK(tag >> kTagSequenceBits == static_cast<Tag>(kTagSets) && tag < Tag{1} << kTagBits);
  ServiceHost next(ranks[0].common, [] {}, host.tags());
  CHECK(!tags.contains(next.next_tag()));
}

}  // namespace

int main() {
  messages_reach_the_service_of_that_number();
  all_are_moved_on_and_hear_of_losses();
  a_closed_one_is_lost_to_the_others_and_kept_while_it_is_touched();
  the_end_of_the_world_ends_them();
  tags_are_their_own();
  return report();
}
