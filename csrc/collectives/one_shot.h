// Turns: ranks repeat an operation that they have done before under the same name (repeat.h) without a negotiation.
//
// Each operation that all ranks of a set have done together has a number, equal on all ranks. All ranks go through the
// same sequence of turns. In a turn, each rank publishes once, in a slot that its node peers map:
//
//   enter     the number of the operation, and its input if that is small
//   decline   number 0: the rank has submitted the operation to the negotiation, has joined, or is late
//
// If all ranks enter the same number, they have agreed. Then a small operation is done in one shot: each rank takes its
// result from the published inputs. Within a node, some larger ones take a second turn (one_shot_node.h). Any other
// runs as if it had been decided (Scheduler). It has a place in the order of the set's operations, so ranks agree on it
// only if they publish the same number of operations run so far.
//
// Otherwise the turn has no result, and the ranks that entered submit their operation to the negotiation, which also
// reports any error.
//
// one_shot_node.h is for the ranks of one node, one_shot_nodes.h for ranks on several nodes, and one_shot_alone.h for
// sets of one rank.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/time.h"
#include "collectives/repeat.h"

namespace sordino {

// Memory in which one rank publishes. Its node peers map it. Only the first kHead bytes have memory from the beginning.
// Data of more than kBeside bytes needs the rest (ProcessSet::remember).
struct OneShotSlots {
  static constexpr std::size_t kMostBytes = 64 * 1024;
  static constexpr std::size_t kBeside = 40;  // bytes that fit next to the stamp, so that a peer reads one cache line
  static constexpr std::size_t kStays = 8 * 1024;  // data up to this size alternate between two places
  static constexpr std::size_t kHalf = 512 * 1024;
  static constexpr std::size_t kMostInShards = kHalf;  // of an all-reduce in two turns (one_shot_node.h)
  static constexpr std::size_t kHead = 4096;
  static constexpr std::uint64_t kLeaving = std::uint64_t{1} << 63;  // see OneShot::withdraw

  struct alignas(64) Slot {
    std::atomic<std::uint64_t> stamp;      // turn that the other fields belong to
    std::atomic<std::uint64_t> operation;  // 0: declined; may have the bit kLeaving
    std::uint64_t after;                   // operations that the rank has run before; 0 if that does not matter
    std::byte few[kBeside];
  };
  Slot slots[2];
  alignas(64) std::atomic<bool> resting;  // a rank that publishes must ring this rank
  // Set by a node's leader: the latest turn in which some rank waits, and the operation that it waits for.
  alignas(64) std::atomic<std::uint64_t> called;
  std::atomic<std::uint64_t> called_for;
  std::atomic<std::uint64_t> begun;    // the latest turn in which the leader may have counted the entries of its node
  std::atomic<std::uint64_t> late;     // turn * ranks + member: the leader has waited long for the member in this turn
  std::atomic<std::uint64_t> gave_up;  // turn in which the rank gave up, so that its memory may change; 0: none
  alignas(kHead) std::byte some[2][kStays];
  std::byte many[2][kHalf];

  Slot& slot(std::uint64_t turn) { return slots[turn % 2]; }
  // Returns the place of a rank's data of a turn. No rank publishes more than `most` bytes in that turn. Successive
  // turns use different halves. Larger data move on through a half from turn to turn, so that a rank writes to cache
  // lines that have left its peers' caches (see Slots in shared_tensors.h).
  std::byte* data(std::uint64_t turn, std::size_t most) {
    if (most <= kBeside) return slot(turn).few;
    if (most <= kStays) return some[turn % 2];
    const std::size_t cell = (most + kStays - 1) / kStays * kStays;
    return many[turn % 2] + turn / 2 % (kHalf / cell) * cell;
  }
  // Bytes, from the beginning, that need memory if ranks publish up to `most` bytes.
  static std::size_t used(std::size_t most) {
    if (most <= kBeside) return kHead;
    return most <= kStays ? offsetof(OneShotSlots, many) : sizeof(OneShotSlots);
  }
};
static_assert(offsetof(OneShotSlots, some) == OneShotSlots::kHead);

// An operation that a rank enters for a turn. Ranks agree if all entries are equal.
struct Entry {
  std::uint64_t number = 0;  // 0: none
  std::uint64_t after = 0;   // see OneShotSlots

  bool operator==(const Entry&) const = default;
};

// The turns of one process set. Only the thread that polls may call it.
class OneShot {
 public:
  using Number = std::uint64_t;
  // Message between the leaders of nodes, apart from its data.
  struct Partial {
    std::uint64_t turn;
    Entry entry;    // operation that the data belong to; 0: no result
    bool call;      // no data yet: some rank waits for this operation
    int late = -1;  // member that the sender waits for; -1 if unknown
  };

  virtual ~OneShot() = default;

  // Returns what ranks publish for this repeat, and prepares it for that. `recipe_of` returns the recipe of a member.
  virtual Repeat::Published publishes(Repeat& repeat,
                                      const std::function<Recipe(std::size_t member)>& recipe_of) const = 0;
  // Bytes of the largest data that a rank publishes for it in a turn.
  virtual std::size_t most_of(const Repeat& repeat) const { return repeat.recipe.most; }
  // Remembers an operation that all ranks of the set have done together.
  virtual void remember(Repeat repeat);
  // The operation with this name and signature, or with this number; null if this rank does not know it.
  virtual std::shared_ptr<const Repeat> find(std::string_view name, const Signature& what);
  std::shared_ptr<const Repeat> find(Number number) const;

  // Whether this rank may enter: no rank waits any more in a turn that this rank declined.
  virtual bool free() = 0;
  // Enters an operation. Its input must stay unchanged until the operation is over.
  virtual void enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input,
                     const std::byte* output) = 0;
  // Whether the outcome of the turn is known.
  virtual bool over() const = 0;
  // Whether the outcome will never be known.
  virtual bool in_vain() const = 0;
  // Ends the turn that this rank has entered. Returns whether all ranks entered the same operation, and can do it.
  virtual bool close() = 0;
  // Writes the result of an operation that ranks have agreed on. Call it at once after close(): peers may then write
  // their next input. Returns false if the operation takes two turns, and this was the first one: then this rank
  // has entered the second one, with the same operation.
  virtual bool deliver(const Repeat& repeat, const std::byte* input, std::byte* output) = 0;
  // Whether this rank is in the second turn of an operation. It has the same outcome on all ranks, or the world fails.
  virtual bool halfway() const { return false; }

  // Takes back this rank's entry, because the rank leaves: then the turn has no result on any rank. False if other
  // ranks may have counted the entry. Then the outcome of the turn holds for this rank, too.
  virtual bool withdraw() = 0;

  // Numbers of the operations for which other ranks wait for this rank in this turn.
  virtual std::vector<Number> awaited() = 0;
  virtual void decline();
  // Between nodes. relays(): whether this rank is a leader, whose advance() moves other ranks on. receive(): a message
  // of another leader has come; throws TransportError if the message is not a valid one.
  virtual bool relays() const { return false; }
  virtual bool advance(Time) { return false; }
  virtual void receive(int member, const Partial& what, std::span<const std::byte> data);

  // A member has left: from now on ranks agree in turns only on operations that it has already entered.
  virtual void note_left(int) { closed_ = true; }
  bool closed() const { return closed_; }
  // The set has been removed, or the world has failed: the peers' slots are not read any more, and inputs that peers
  // read in this rank's memory from now on do not count.
  void abandon() {
    closed_ = abandoned_ = true;
    slots_[me_]->gave_up.store(turn_);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // before the caller changes its memory
  }

  // Says whether this rank may sleep until peers ring it. Call over() again after this, before sleeping.
  void rest(bool may_sleep) { slots_[me_]->resting.store(may_sleep); }
  bool rests(std::size_t place) const { return !abandoned_ && slots_[place]->resting.load(); }
  // Calls ring(member) for the members on this node that rest.
  template <class Ring>
  void wake(Ring&& ring) const {
    for (std::size_t place = 0; place < slots_.size(); ++place) {
      if (place != me_ && rests(place)) ring(members_[place]);
    }
  }
  // The members of the set that are on this node, and this rank's place among them.
  const std::vector<int>& members_of_node() const { return members_; }
  std::size_t place() const { return me_; }
  // Members that this rank waits for.
  virtual std::vector<int> missing() const = 0;

 protected:
  // `slots`: of the set's members on this node, in order. `members`: their indices in the set. `me`: this rank's place
  // among them. `ranks`: number of ranks in the set.
  OneShot(std::vector<OneShotSlots*> slots, std::vector<int> members, std::size_t me, std::size_t ranks)
      : slots_(std::move(slots)), members_(std::move(members)), me_(me), ranks_(ranks) {}

  OneShotSlots::Slot& slot(std::size_t place, std::uint64_t turn) const { return slots_[place]->slot(turn); }
  bool has_entered(std::size_t place, std::uint64_t turn) const { return slot(place, turn).stamp.load() >= turn; }
  Number number_of(std::size_t place, std::uint64_t turn) const {
    return slot(place, turn).operation.load() & ~OneShotSlots::kLeaving;
  }
  // Number of an entry that counts from now on, even if its rank is leaving.
  Number counted(std::size_t place, std::uint64_t turn) const;
  // Takes back this rank's published entry, unless may_be_counted(), which is called once others can see that this rank
  // is leaving. Returns whether the entry was taken back.
  template <class MayBeCounted>
  bool withdraw_unless(MayBeCounted&& may_be_counted) {
    std::atomic<Number>& own = slot(me_, turn_).operation;
    Number leaving = own.fetch_or(OneShotSlots::kLeaving) | OneShotSlots::kLeaving;
    return !may_be_counted() && own.compare_exchange_strong(leaving, 0);
  }
  // Publishes an entry and data for this rank's turn. `most`: largest number of bytes that a rank publishes with it.
  void publish(Entry entry, const std::byte* data, std::size_t bytes, std::size_t most);
  // Publishes an entry. Its data are in place.
  void publish(Entry entry);

  const std::vector<OneShotSlots*> slots_;  // by place
  const std::vector<int> members_;
  const std::size_t me_, ranks_;
  std::uint64_t turn_ = 1;  // not 0, because a fresh slot has stamp 0
  bool closed_ = false, abandoned_ = false;

 private:
  static constexpr std::size_t kMostKnown = 4096;

  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  struct Known {
    std::shared_ptr<const Repeat> repeat;
    bool found = false;  // since the last time that operations were dropped
  };
  void drop_unused();

  std::unordered_map<std::string, Known, Hash, std::equal_to<>> known_;
  std::unordered_map<Number, std::shared_ptr<const Repeat>> numbered_;
};

}  // namespace sordino
