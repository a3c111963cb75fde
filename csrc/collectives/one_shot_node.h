// Turns among the ranks of one node.
//
//   enter     the number of the operation, and my input if it is small -> my slot, which the peers map
//   over      whether all ranks have published for this turn
//   close     whether all numbers are equal
//   deliver   each rank reads all inputs in rank order, so all get the same bits
//
// Turns use two slots alternately, and no barrier closes a turn. A rank that publishes for turn t + 1 has read the
// inputs of turn t. So once all have published for turn t + 1, no rank reads the slots of turn t any more, and turn
// t + 2 reuses them.
//
// A rank that leaves while the turn is open takes its entry back (withdraw). It first marks the entry, and then checks
// whether all have entered:
//
//   not all have   it sets its number to 0. A rank that closes the turn later has seen all stamps, so it sees the mark,
//                  too, and counts the entry only if it can remove the mark first. So one of the two succeeds, and the
//                  other one sees it
//   all have       it ends the turn like all ranks
#pragma once

#include "collectives/one_shot.h"

namespace sordino {

class OneShotNode : public OneShot {
 public:
  // `crowded`: ranks of the node share cores.
  OneShotNode(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me, bool crowded)
      : OneShot(std::move(slots), std::move(members), me, slots.size()), crowded_(crowded) {}

  bool carries(Repeat& repeat, const std::function<Recipe(std::size_t)>& recipe_of) const override;
  bool free() override { return all_entered(turn_ - 1); }
  void enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input) override;
  bool over() const override { return all_entered(turn_); }
  bool in_vain() const override { return closed_; }
  bool close() override;
  void deliver(const Repeat& repeat, const std::byte* input, std::byte* output) override;
  bool withdraw() override;
  std::vector<Number> awaited() override;
  std::vector<int> missing() const override;

 private:
  bool all_entered(std::uint64_t turn) const;
  bool agreed(std::uint64_t turn) const;

  const bool crowded_;
  std::vector<const std::byte*> sources_;
};

}  // namespace sordino
