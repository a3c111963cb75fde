// All-reduce of a small tensor in one shot: what the ranks of a node have reduced under a name before needs no
// agreement when it comes again.
//
//   lay    my input, and the number of the operation that it is for -> my slot, which the others map
//   look   until all have laid one for this turn
//   fold   if all numbers are the same: all inputs, by each rank for itself, in rank order, so all get the same bits
//
// Turns take two slots alternately, and no barrier closes one: who lays for turn t + 1 has folded turn t, so when all
// have laid for t + 1 nobody reads the slots of t any more, which t + 2 takes. A rank that does not come (it has
// submitted the operation, has joined, or is late) declines a turn: it lays no number. Then, and where numbers differ,
// all who came have their operation done the usual way, which tells what is wrong if anything is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/time.h"
#include "kernels/kernels.h"

namespace sordino {

// What one rank lays down, in memory that its node peers map.
struct OneShotSlots {
  static constexpr std::size_t kMostBytes = 64 * 1024;
  static constexpr std::size_t kBeside = 48;  // as many bytes have room beside the stamp: a peer reads one cache line

  struct alignas(64) Slot {
    std::atomic<std::uint64_t> stamp;  // the turn that what follows is for
    std::uint64_t operation;           // 0: declined
    std::byte few[kBeside];
    std::byte many[kMostBytes];

    std::byte* data(std::size_t bytes) { return bytes <= kBeside ? few : many; }
  };
  Slot slots[2];
  alignas(64) std::atomic<bool> resting;  // whoever lays something is to ring
};

// Of one process set whose ranks all share a node; of the thread that polls.
class OneShot {
 public:
  // What an operation is beside its name; the same on all ranks, or it is another one.
  struct What {
    ReduceOp op;
    DType dtype;
    double prescale, postscale;
    std::vector<std::int64_t> shape;

    std::size_t count() const { return count_of(shape); }
    std::size_t bytes() const { return count() * size_of(dtype); }
    bool operator==(const What&) const = default;
  };
  using Number = std::uint64_t;

  OneShot(std::vector<OneShotSlots*> slots, std::size_t me) : slots_(std::move(slots)), me_(me) {}

  // Whether a tensor of so many bytes is small enough for `ranks` ranks: each reads all inputs.
  static bool fits(std::size_t bytes, std::size_t ranks) { return bytes * ranks <= 2 * OneShotSlots::kMostBytes; }

  // All ranks of the set have done this operation, the `number`th thing that they did together (not 0).
  void remember(std::string_view name, What what, Number number);
  // Its number; 0 if this rank knows of none.
  Number number_of(std::string_view name, const What& what) const;

  // Whether this rank may lay: what it declined is not waited for by anybody any more.
  bool free() const { return all_laid(turn_ - 1); }
  void lay(Number number, std::span<const std::byte> data);
  bool all_laid() const { return all_laid(turn_); }
  // Ends a turn for which all have laid; whether they laid the same number. The inputs are read before the next turn.
  bool agreed();
  // Folds what was laid for the turn that has ended: this rank's from `input`.
  void fold(ReduceOp op, DType dtype, std::size_t count, double pre, double post, const std::byte* input,
            std::byte* output);

  // What others have laid that wait for this rank.
  std::vector<Number> awaited() const;
  // The name of an operation; empty if this rank knows of none.
  std::string_view name_of(Number number) const;
  void decline();
  // A rank has left: nobody waits for it, and nothing is done in one shot any more.
  void close() { closed_ = true; }
  bool closed() const { return closed_; }
  // The set is about to be removed, and with it the others' slots: they are not looked at any more.
  void abandon() { closed_ = abandoned_ = true; }
  // This rank may sleep until others ring it; ask all_laid() in between.
  void rest(bool may_sleep) { slots_[me_]->resting.store(may_sleep); }
  bool rests(std::size_t member) const { return !abandoned_ && slots_[member]->resting.load(); }

  // Members that have not laid for this turn.
  std::vector<std::size_t> missing() const;

 private:
  static constexpr std::size_t kMostKnown = 4096;

  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  struct Known {
    What what;
    Number number = 0;
  };

  OneShotSlots::Slot& slot(std::size_t member, std::uint64_t turn) const { return slots_[member]->slots[turn % 2]; }
  bool all_laid(std::uint64_t turn) const;
  void publish(Number number);

  const std::vector<OneShotSlots*> slots_;  // by member
  const std::size_t me_;
  std::uint64_t turn_ = 1;  // a fresh slot has stamp 0
  bool closed_ = false, abandoned_ = false;
  std::unordered_map<std::string, Known, Hash, std::equal_to<>> known_;
  std::unordered_map<Number, std::string> names_;  // of what is known
  std::vector<const std::byte*> sources_;
};

}  // namespace sordino
