#include "collectives/one_shot.h"

#include <utility>

#include "base/error.h"
#include "kernels/publish.h"

namespace sordino {

void OneShot::remember(Repeat repeat) {
  auto found = known_.find(repeat.name);
  if (found == known_.end()) {
    if (known_.size() >= kMostKnown) drop_unused();
    found = known_.try_emplace(repeat.name).first;
  } else {
    numbered_.erase(found->second.repeat->number);
  }
  std::shared_ptr<const Repeat>& known = found->second.repeat;
  known = std::make_shared<const Repeat>(std::move(repeat));
  numbered_.emplace(known->number, known);
}

// Drops the operations that have not repeated, so that a stream of new names displaces none that repeats. If ranks drop
// different operations, the next turn has no result, and all remember the operation anew.
void OneShot::drop_unused() {
  for (auto place = known_.begin(); place != known_.end();) {
    if (std::exchange(place->second.found, false)) {
      ++place;
    } else {
      numbered_.erase(place->second.repeat->number);
      place = known_.erase(place);
    }
  }
  if (known_.size() < kMostKnown / 2) return;
  known_.clear();
  numbered_.clear();
}

std::shared_ptr<const Repeat> OneShot::find(std::string_view name, const Signature& what) {
  const auto found = known_.find(name);
  if (found == known_.end() || found->second.repeat->what != what) return nullptr;
  found->second.found = true;
  return found->second.repeat;
}

std::shared_ptr<const Repeat> OneShot::find(Number number) const {
  const auto found = numbered_.find(number);
  return found == numbered_.end() ? nullptr : found->second;
}

void OneShot::decline() {
  publish({}, nullptr, 0, 0);
  ++turn_;
}

OneShot::Number OneShot::counted(std::size_t place, std::uint64_t turn) const {
  std::atomic<Number>& operation = slot(place, turn).operation;
  Number number = operation.load();
  if (number & OneShotSlots::kLeaving) {
    // Either this succeeds, or the rank has taken its entry back, or another rank has counted it.
    const Number without = number & ~OneShotSlots::kLeaving;
    if (operation.compare_exchange_strong(number, without)) number = without;
  }
  return number;
}

void OneShot::receive(int member, const Partial&, std::span<const std::byte>) {
  throw TransportError("member " + std::to_string(member) +
                       " of a process set sent a one-shot message to a member that leads no node");
}

void OneShot::publish(Entry entry, const std::byte* data, std::size_t bytes, std::size_t most) {
  if (bytes > 0) kernels::publish(slots_[me_]->data(turn_, most), data, bytes);
  publish(entry);
}

void OneShot::publish(Entry entry) {
  OneShotSlots::Slot& own = slot(me_, turn_);
  own.operation.store(entry.number, std::memory_order_relaxed);
  own.after = entry.after;
  // Sequentially consistent with has_entered() and `resting`: either this rank sees `resting`, or the resting rank sees
  // this stamp.
  own.stamp.store(turn_);
}

}  // namespace sordino
