// All-reduce of a small tensor in one shot: what ranks have reduced under a name before needs no agreement when it
// comes again.
//
// What all ranks of a set have done together has a number, the same on all of them. Each lays its input and the number
// of the operation that it is for into a slot that the others of its node map. Such turns follow each other on all
// ranks alike. A rank that does not come (it has submitted the operation, has joined, or is late) declines a turn: it
// lays no number. Then, and where numbers differ, all who came have their operation done the usual way, which tells
// what is wrong if anything is.
//
// one_shot_node.h is for the ranks of one node, one_shot_nodes.h for those of several.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/dtype.h"
#include "base/time.h"

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
  // Of a node's leader: the latest turn in which somebody waits, and the operation that it is for.
  alignas(64) std::atomic<std::uint64_t> called;
  std::atomic<std::uint64_t> called_for;
  std::atomic<std::uint64_t> late;  // times members of the set, a turn; and the member that it has waited for long
};

// Of one process set and the thread that polls.
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
  // What goes between nodes, besides data.
  struct Partial {
    std::uint64_t turn;
    Number number;  // of the operation that the data are of; 0: there are none
    bool call;      // there are none yet: somebody waits, for such an operation
    int late = -1;  // who is waited for, a member; -1 if that is not known
  };

  virtual ~OneShot() = default;

  // Whether a tensor of so many bytes is small enough.
  virtual bool fits(std::size_t bytes) const = 0;
  // All ranks of the set have done this operation, the `number`th thing that they did together (not 0).
  void remember(std::string_view name, What what, Number number);
  // Its number; 0 if this rank knows of none.
  Number number_of(std::string_view name, const What& what) const;
  // The name of an operation; empty if this rank knows of none.
  std::string_view name_of(Number number) const;

  // Whether this rank may lay: what it declined is not waited for by anybody any more.
  virtual bool free() = 0;
  // The input stays as it is until the turn is over.
  virtual void lay(Number number, const What& what, const std::byte* input) = 0;
  // Whether it is known what has become of the turn.
  virtual bool over() const = 0;
  // Whether it never will be.
  virtual bool in_vain() const = 0;
  // Ends a turn that this rank has laid for; whether all have laid the same number, so that `output` has the result.
  virtual bool take(const What& what, const std::byte* input, std::byte* output) = 0;

  // What others have laid that wait for this rank.
  virtual std::vector<Number> awaited() = 0;
  virtual void decline();
  // Between nodes: whether this rank is one that moves others on, as advance() does; and what a member has sent.
  // TransportError if that makes no sense.
  virtual bool relays() const { return false; }
  virtual bool advance(Time) { return false; }
  virtual void receive(int member, const Partial& what, std::span<const std::byte> data);

  // A member has left: nothing is done in one shot any more but what it has laid for.
  virtual void leave(int) { closed_ = true; }
  bool closed() const { return closed_; }
  // The set is about to be removed, and with it the others' slots: they are not looked at any more.
  void abandon() { closed_ = abandoned_ = true; }

  // This rank may sleep until others ring it; ask over() in between.
  void rest(bool may_sleep) { slots_[me_]->resting.store(may_sleep); }
  bool rests(std::size_t place) const { return !abandoned_ && slots_[place]->resting.load(); }
  // Calls ring(member) for those of this node that rest.
  template <class Ring>
  void wake(Ring&& ring) const {
    for (std::size_t place = 0; place < slots_.size(); ++place) {
      if (place != me_ && rests(place)) ring(members_[place]);
    }
  }
  // Members of the set that are on this node, and which of them this rank is.
  const std::vector<int>& members_of_node() const { return members_; }
  std::size_t place() const { return me_; }
  // Members that this rank waits for.
  virtual std::vector<int> missing() const = 0;

 protected:
  // `slots`: of the set's members on this node, in order; `members`: which these are; `me`: this rank's place among
  // them; `ranks`: of the set.
  OneShot(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me, std::size_t ranks)
      : slots_(std::move(slots)), members_(std::move(members)), me_(me), ranks_(ranks) {}

  OneShotSlots::Slot& slot(std::size_t place, std::uint64_t turn) const { return slots_[place]->slots[turn % 2]; }
  bool has_laid(std::size_t place, std::uint64_t turn) const { return slot(place, turn).stamp.load() >= turn; }
  // Lays data and number for this rank's turn.
  void publish(Number number, const std::byte* data, std::size_t bytes);

  const std::vector<OneShotSlots*> slots_;  // by place
  const std::vector<int> members_;
  const std::size_t me_, ranks_;
  std::uint64_t turn_ = 1;  // a fresh slot has stamp 0
  bool closed_ = false, abandoned_ = false;

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
  std::unordered_map<std::string, Known, Hash, std::equal_to<>> known_;
  std::unordered_map<Number, std::string> names_;  // of what is known
};

}  // namespace sordino
