#include "collectives/one_shot.h"

#include <cstring>

#include "base/error.h"

namespace sordino {

void OneShot::remember(std::string_view name, What what, Number number) {
  auto found = known_.find(name);
  if (found == known_.end()) {
    if (known_.size() >= kMostKnown) {
      known_.clear();
      names_.clear();
    }
    found = known_.emplace(name, Known{}).first;
  }
  names_.erase(found->second.number);
  names_.emplace(number, name);
  found->second = {std::move(what), number};
}

std::string_view OneShot::name_of(Number number) const {
  const auto found = names_.find(number);
  return found == names_.end() ? std::string_view{} : found->second;
}

OneShot::Number OneShot::number_of(std::string_view name, const What& what) const {
  const auto found = known_.find(name);
  return found != known_.end() && found->second.what == what ? found->second.number : 0;
}

void OneShot::decline() {
  publish(0, nullptr, 0);
  ++turn_;
}

void OneShot::receive(int member, const Partial&, std::span<const std::byte>) {
  throw TransportError("member " + std::to_string(member) +
                       " of a process set sent a one-shot message to a member that leads no node");
}

void OneShot::publish(Number number, const std::byte* data, std::size_t bytes) {
  OneShotSlots::Slot& own = slot(me_, turn_);
  if (bytes > 0) std::memcpy(own.data(bytes), data, bytes);
  own.operation = number;
  // Sequentially consistent with has_entered() and `resting`: either this rank sees `resting`, or the resting rank sees
  // this stamp.
  own.stamp.store(turn_);
}

}  // namespace sordino
