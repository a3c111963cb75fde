// One-shot all-reduce of ranks on several nodes. The first of a node's ranks is its leader.
//
//   lay     my input, and the number of the operation -> my slot, which my node's leader maps
//   fold    by the leader, when all of its node have laid: their inputs, in rank order, into the node's partial result
//   double  leaders give each other number and partial result in the tree of recursive_doubling.h, so that all leaders
//           get the same bits, and those that the usual way gets
//   tell    by the leader: the result -> its slot, which its node's ranks map
//
// In every turn a leader tells each of its partners once: its partial result, or that there is none (number 0) because
// a rank declined, or numbers differ. What is none stays none in the tree, so all leaders come to the same end, none
// goes on to turn t + 1 before all have begun turn t, and what comes for t + 1 waits. Nobody waits for a node that does
// not know: what comes for its turn is shown to its ranks, which come or decline; who waits for a leader that he gives
// nothing before, calls it.
//
// The leader tells that there is no result as soon as it knows that of its node; whoever has not laid for that turn has
// no part in it any more. It writes to the slot of turn t when all of its node have laid, declined or passed over turn
// t - 1, so have read what was in it.
//
// Who has waited long says for whom, to those who wait for it, so that all name the same rank if nothing comes of it.
//
// Who leaves has nothing to wait for, so what it has laid or sent counts; what a rank has not that has left is none.
#pragma once

#include <optional>

#include "base/wire.h"
#include "collectives/one_shot.h"

namespace sordino {

// Of a rank that is no leader.
class OneShotFollower : public OneShot {
 public:
  // `slots`: of its node's members.
  OneShotFollower(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me, std::size_t ranks)
      : OneShot(std::move(slots), std::move(members), me, ranks) {}

  bool fits(std::size_t bytes) const override { return bytes <= OneShotSlots::kMostBytes; }
  bool free() override;
  void lay(Number number, const What& what, const std::byte* input) override;
  bool over() const override { return !abandoned_ && has_laid(0, turn_); }
  bool in_vain() const override { return abandoned_ || led_by_nobody_; }
  bool take(const What& what, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  void leave(int member) override;
  std::vector<int> missing() const override;

 private:
  void pass_over();

  bool laid_ = false;  // for this turn
  bool led_by_nobody_ = false;
};

class OneShotLeader : public OneShot {
 public:
  using Send = std::function<void(int member, const Partial& what, std::span<const std::byte> data)>;

  // `slots`: of its node's members, itself first. `sites`: the set's members by node (collectives/sites.h), its own
  // being `mine`.
  OneShotLeader(std::vector<OneShotSlots*> slots, const std::vector<std::vector<int>>& sites, std::size_t mine,
                std::size_t ranks, Send send);

  bool fits(std::size_t bytes) const override { return bytes <= OneShotSlots::kMostBytes; }
  bool free() override { return own_ == Own::kNothing && !begun_; }
  void lay(Number number, const What& what, const std::byte* input) override;
  bool over() const override { return !abandoned_ && own_ == Own::kLaid && told_ == turn_; }
  bool in_vain() const override { return abandoned_; }
  bool take(const What& what, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  void decline() override { own_ = Own::kDeclined; }
  bool advance(Time now) override;
  bool relays() const override { return true; }
  void leave(int member) override;
  std::vector<int> missing() const override;

  void receive(int member, const Partial& what, std::span<const std::byte> data) override;

 private:
  enum class Own { kNothing, kLaid, kDeclined };  // for this turn
  struct Step {
    enum class Does { kCall, kSend, kMerge, kReplace } does;
    std::size_t site;
  };
  struct Arrived {
    std::uint64_t turn = 0;
    Number number = 0;
    Bytes data;
  };
  // Of the leader of another site.
  struct Partner {
    int member = 0;
    bool gone = false;
    Arrived arrived[2];  // by turn
    std::uint64_t called = 0;
    Number called_for = 0;
    int late = -1;  // whom it waits for in that turn
  };

  Arrived& arrived(std::size_t site) { return partners_[site].arrived[turn_ % 2]; }
  bool show_call(Time now);
  bool begin(Time now);
  bool follow(const Step& step);
  void name_late();
  void combine(Arrived& theirs, const Step& step);
  void fold();
  void tell();
  void next_turn();

  const std::size_t mine_;
  const Send send_;
  std::vector<Partner> partners_;  // by site, this one among them
  std::vector<Step> steps_;        // of a turn
  std::vector<bool> gone_;         // by place

  // Of this turn.
  Own own_ = Own::kNothing;
  What what_;  // what this rank has laid
  const std::byte* input_ = nullptr;
  std::optional<Time> since_;  // somebody waits
  bool begun_ = false;         // what comes of this node is known
  Number number_ = 0;          // of what is folded so far; 0: there will be no result
  std::size_t step_ = 0;
  int late_ = -1;           // whom this rank has told the others that it waits for
  std::uint64_t told_ = 0;  // the latest turn that is over

  Bytes partial_;
  std::vector<const std::byte*> sources_;
};

}  // namespace sordino
