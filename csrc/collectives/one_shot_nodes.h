// Turns among ranks on several nodes. The first rank of each node is its leader.
//
//   enter    follower: the number of the operation, and its input -> its slot, which its leader maps
//   fold     leader, once all of its node have entered: their inputs -> the node's partial result
//   double   leaders: exchange numbers and partial results in the tree of recursive_doubling.h, so that all get the
//            same bits as from a negotiated operation
//   tell     leader: the results -> memory that the followers of its node map
//
// The partial result of an all-reduce is the fold of the node's inputs, in rank order. Partial results are folded, too,
// and the result lies in the leader's slot. The partial results of other operations are the blocks of node_blocks.h,
// and the tree gathers the blocks of all nodes. A reduce-scatter's leader folds the results of its node, in memory
// behind the slots of its block. The leader writes there only if all of its node have entered the turn: so they have
// read what it wrote in earlier turns. If nothing is folded, the blocks lie there, the leader publishes its input, and
// each rank lays its result out itself. It may still do so when the next turn is over, because some rank declined it.
// So no rank of its node enters the turn after that before it has entered or declined the next one.
//
// A turn at its leader:
//
//   !begun_          begin() waits for the partial result of the node, or for "no result" (number 0)
//   begun_           follow() runs the steps with the leaders of other nodes, one after the other
//   told_ == turn_   tell() has published the outcome. If the leader itself has entered, close() ends the turn
//
// In a turn, a leader sends each partner one partial result, or "no result" if a rank declined or numbers differ. A
// leader that receives "no result" forwards it, so all leaders agree on the outcome. No leader starts turn t + 1 before
// all have begun turn t; messages for turn t + 1 wait until then.
//
// No rank waits for a node that does not know of the turn. A leader shows its followers that some rank waits, and they
// enter or decline. A leader that must wait for a partner before it can send to that partner sends it a call first.
//
// If the outcome is "no result", a leader does not wait for the rest of its node; a rank that has not entered passes
// over the turn. A leader begins turn t once all of its node have entered, declined or passed over turn t - 1. By then
// they have read the slot that turn t reuses.
//
// A leader that has waited long names the missing member to the ranks that wait for it, so that all name the same one.
//
// Data that a rank has published before it leaves stays valid; the rest is "no result". A rank that leaves while it
// waits in a turn takes its entry back (withdraw) unless the turn has begun: a leader declines, and a follower marks
// its entry as in one_shot_node.h. A leader shows that it has begun before it counts the entries.
#pragma once

#include <optional>

#include "base/wire.h"
#include "collectives/node_blocks.h"
#include "collectives/one_shot.h"
#include "collectives/sites.h"

namespace sordino {

// Common part of leaders and followers.
class OneShotNodes : public OneShot {
 public:
  Repeat::Published publishes(Repeat& repeat,
                              const std::function<Recipe(std::size_t member)>& recipe_of) const override;

 protected:
  // `slots`: of the members on this node. `results`: NodeBlocks::kMostBytes bytes of the leader's memory, which all of
  // them map, for results or blocks; null if this rank is alone on its node.
  OneShotNodes(std::vector<OneShotSlots*> slots, Sites sites, std::size_t ranks, std::byte* results)
      : OneShot(std::move(slots), sites.own(), sites.place, ranks), sites_(std::move(sites)), results_(results) {}
  // Writes the result of this rank, of the turn that has just ended. `blocks`: of all nodes, unless the operation
  // folds.
  void deliver_blocks(const Repeat& repeat, const std::byte* input, const std::byte* blocks, std::byte* output);

  const Sites sites_;
  std::byte* results_;
  std::vector<const std::byte*> inputs_;  // by place
};

// Turns of a rank that is no leader.
class OneShotFollower : public OneShotNodes {
 public:
  OneShotFollower(std::vector<OneShotSlots*> slots, Sites sites, std::size_t ranks, std::byte* results)
      : OneShotNodes(std::move(slots), std::move(sites), ranks, results) {}

  bool free() override;
  void enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input, const std::byte*) override;
  bool over() const override { return !abandoned_ && has_entered(0, turn_); }
  bool in_vain() const override { return abandoned_ || leader_left_; }
  bool close() override;
  bool withdraw() override;
  bool deliver(const Repeat& repeat, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  void note_left(int member) override;
  std::vector<int> missing() const override;

 private:
  void pass_over();

  bool entered_ = false;  // in this turn
  bool leader_left_ = false;
};

class OneShotLeader : public OneShotNodes {
 public:
  using Send = std::function<void(int member, const Partial& what, std::span<const std::byte> data)>;

  OneShotLeader(std::vector<OneShotSlots*> slots, Sites sites, std::size_t ranks, std::byte* results, Send send);

  bool free() override { return own_ == Own::kNothing && !begun_; }
  void enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input, const std::byte*) override;
  bool over() const override { return !abandoned_ && own_ == Own::kEntered && told_ == turn_; }
  bool in_vain() const override { return abandoned_; }
  bool close() override;
  bool deliver(const Repeat& repeat, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  void decline() override { own_ = Own::kDeclined; }
  bool withdraw() override;
  bool advance(Time now) override;
  bool relays() const override { return true; }
  void note_left(int member) override;
  std::vector<int> missing() const override;

  void receive(int member, const Partial& what, std::span<const std::byte> data) override;

 private:
  enum class Own { kNothing, kEntered, kDeclined };  // this rank in this turn
  struct Step {
    enum class Does { kCall, kSend, kMerge, kReplace } does;
    std::size_t site;
    std::vector<int> sites;  // the message combines the partial results of these sites
  };
  struct Arrived {
    std::uint64_t turn = 0;
    Entry entry;
    Bytes data;
  };
  // The leader of one node.
  struct Partner {
    int member = 0;
    bool gone = false;
    Arrived arrived[2];  // by turn modulo 2
    std::uint64_t called = 0;
    Number called_for = 0;
    int late = -1;  // member that it waits for in that turn
  };

  Arrived& arrived(std::size_t site) { return partners_[site].arrived[turn_ % 2]; }
  bool show_call(Time now);
  bool begin(Time now);
  bool follow(const Step& step);
  void name_late();
  std::span<const std::byte> outgoing(const Step& step);
  void combine(Arrived& theirs, const Step& step);
  void fold();
  std::byte* blocks() { return slots_.size() > 1 && !repeat_->recipe.folds ? results_ : blocks_.data(); }
  void reduce_partial(std::span<const std::byte* const> sources, double pre);
  void tell();
  void next_turn();

  const Send send_;
  std::vector<Partner> partners_;  // by site, this one included
  std::vector<Step> steps_;        // of a turn
  std::vector<bool> gone_;         // by place: it has left

  // State of this turn.
  Own own_ = Own::kNothing;
  std::shared_ptr<const Repeat> repeat_;  // the operation that this rank has entered
  const std::byte* input_ = nullptr;
  std::optional<Time> since_;  // when a rank was first seen to wait
  bool begun_ = false;         // the outcome of this node is known
  Entry entry_;                // of the values folded so far; 0: no result
  std::size_t step_ = 0;
  int late_ = -1;           // member that this rank has named as late
  std::uint64_t told_ = 0;  // the latest turn whose outcome is published

  Bytes partial_;          // of an all-reduce
  Bytes blocks_, joined_;  // of other operations (node_blocks.h)
  Bytes own_results_;      // if it is alone on its node
};

}  // namespace sordino
