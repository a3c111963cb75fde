// One-shot all-reduce of ranks that all share a node.
//
//   lay    my input, and the number of the operation -> my slot, which the others map
//   look   until all have laid for this turn
//   fold   if all numbers are the same: all inputs, by each rank for itself, in rank order, so all get the same bits
//
// Turns take two slots alternately, and no barrier closes one: who lays for turn t + 1 has folded turn t, so when all
// have laid for t + 1 nobody reads the slots of t any more, which t + 2 takes.
#pragma once

#include "collectives/one_shot.h"

namespace sordino {

class OneShotNode : public OneShot {
 public:
  OneShotNode(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me)
      : OneShot(std::move(slots), std::move(members), me, slots.size()) {}

  // Each rank reads all inputs.
  bool fits(std::size_t bytes) const override { return bytes * ranks_ <= 2 * OneShotSlots::kMostBytes; }
  bool free() override { return all_laid(turn_ - 1); }
  void lay(Number number, const What& what, const std::byte* input) override { publish(number, input, what.bytes()); }
  bool over() const override { return all_laid(turn_); }
  bool in_vain() const override { return closed_; }
  bool take(const What& what, const std::byte* input, std::byte* output) override;
  std::vector<Number> awaited() override;
  std::vector<int> missing() const override;

 private:
  bool all_laid(std::uint64_t turn) const;
  bool agreed(std::uint64_t turn) const;
  void fold(std::uint64_t turn, const What& what, const std::byte* input, std::byte* output);

  std::vector<const std::byte*> sources_;
};

}  // namespace sordino
