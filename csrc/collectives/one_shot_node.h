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
// Two kinds of larger operations take two turns. Once ranks have agreed in the first one, each enters the second one
// with the same operation:
//
//   shards      an all-reduce. Each rank owns a shard of the elements
//     enter     my input without my shard -> my slot
//     deliver   I fold my shard of all inputs -> my output, and my slot of the second turn
//     deliver   the shards of the others -> my output
//   locations   an operation whose ranks reach each other's memory. They did so when it ran after a negotiation
//     enter     where my input is -> my slot. If a rank's input cannot be reached, the turn has no result
//     deliver   I read the inputs where they are, and enter the second turn without data. If the kernel cannot copy an
//               input, I decline it: then the operation has no result, and is negotiated
//     deliver   nothing: all ranks have read my input
//
// A rank that gives up, because its world has failed, sets a flag in its slots: its input may change from then on. A
// rank that has read that input does not enter the second turn, but waits until its own world fails, too.
//
// A rank that leaves while the turn is open takes its entry back (withdraw), unless it is a second turn: the others
// have changed their memory by then. It first marks the entry, and then checks whether all have entered:
//
//   not all have   it sets its number to 0. A rank that closes the turn later has seen all stamps, so it sees the mark,
//                  too, and counts the entry only if it can remove the mark first. So one of the two succeeds, and the
//                  other one sees it
//   all have       it ends the turn like all ranks
#pragma once

#include "collectives/one_shot.h"
#include "transport/node_memory.h"

namespace sordino {

class OneShotNode : public OneShot {
 public:
  // `crowded`: ranks of the node share cores. `world_ranks`: of the members, all of which are on this node.
  OneShotNode(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me, bool crowded,
              std::vector<int> world_ranks, NodeMemory& memory)
      : OneShot(std::move(slots), std::move(members), me, slots.size()),
        crowded_(crowded),
        world_ranks_(std::move(world_ranks)),
        memory_(memory) {}

  Repeat::Published publishes(Repeat& repeat, const std::function<Recipe(std::size_t)>& recipe_of) const override;
  std::size_t most_of(const Repeat& repeat) const override;
  bool free() override { return all_entered(turn_ - 1); }
  void enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input,
             const std::byte* output) override;
  bool over() const override { return all_entered(turn_); }
  bool in_vain() const override { return halfway_ ? abandoned_ : closed_; }
  bool close() override;
  bool deliver(const Repeat& repeat, const std::byte* input, std::byte* output) override;
  bool halfway() const override { return halfway_; }
  bool withdraw() override;
  std::vector<Number> awaited() override;
  std::vector<int> missing() const override;

 private:
  // A rank publishes this in the first turn of an operation by locations.
  struct Offer {
    bool reached;  // peers can reach it, or need nothing of it
    Location place;
  };

  bool all_entered(std::uint64_t turn) const;
  bool agreed(std::uint64_t turn) const;
  const std::byte* published(std::size_t place, std::size_t most) const { return slots_[place]->data(turn_ - 1, most); }
  void assemble_published(const Repeat& repeat, const std::byte* input, std::byte* output);
  // Operations by shards.
  void publish_shards(const Repeat& repeat, const std::byte* input);
  void fold_shard(const Repeat& repeat, const std::byte* input, std::byte* output);
  void take_shards(const Repeat& repeat, std::byte* output) const;
  // Operations by locations.
  Offer offer(const Repeat& repeat, const std::byte* input, const std::byte* output) const;
  const Offer& offer_of(std::size_t place) const;
  bool all_offered() const;
  std::byte* map(std::size_t place) const;
  void take_where_they_are(const Repeat& repeat, const std::byte* input, std::byte* output);
  void copy_parts(const Recipe& recipe, const std::byte* input, std::byte* output);
  void reduce_in_place(const Repeat& repeat, std::byte* data);
  std::vector<int> who_gave_up() const;

  const bool crowded_;
  const std::vector<int> world_ranks_;  // by place
  NodeMemory& memory_;
  std::shared_ptr<const Repeat> repeat_;  // of this rank's latest turn, like `entry_`
  Entry entry_;
  bool halfway_ = false;                   // this rank is in the second turn of `repeat_`
  std::vector<const std::byte*> sources_;  // by place
  std::vector<std::byte*> results_;
};

}  // namespace sordino
