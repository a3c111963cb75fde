// One-shot all-reduce among the ranks of one node.
//
//   enter   my input, and the number of the operation -> my slot, which the peers map
//   over    whether all ranks have published for this turn
//   take    if all numbers are equal: each rank folds all inputs in rank order, so all get the same bits
//
// Turns use two slots alternately, and no barrier closes a turn. A rank that publishes for turn t + 1 has folded the
// inputs of turn t. So once all have published for turn t + 1, no rank reads the slots of turn t any more, and turn
// t + 2 reuses them.
#pragma once

#include "collectives/one_shot.h"

namespace sordino {

class OneShotNode : public OneShot {
 public:
  OneShotNode(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me)
      : OneShot(std::move(slots), std::move(members), me, slots.size()) {}

  // The limit is on the bytes of all ranks, because each rank reads all inputs.
  bool fits(std::size_t bytes) const override { return bytes * ranks_ <= 2 * OneShotSlots::kMostBytes; }
  bool free() override { return all_entered(turn_ - 1); }
  void enter(Number number, const What& what, const std::byte* input) override { publish(number, input, what.bytes()); }
  bool over() const override { return all_entered(turn_); }
  bool in_vain() const override { return closed_; }
  bool take(const What& what, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  std::vector<int> missing() const override;

 private:
  bool all_entered(std::uint64_t turn) const;
  bool agreed(std::uint64_t turn) const;
  void fold(std::uint64_t turn, const What& what, const std::byte* input, std::byte* output);

  std::vector<const std::byte*> sources_;
};

}  // namespace sordino
