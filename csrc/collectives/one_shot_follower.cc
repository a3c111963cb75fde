#include <cstring>

#include "collectives/one_shot_nodes.h"

namespace sordino {

// Declines turns that were over before this rank entered an input for them.
void OneShotFollower::pass_over() {
  while (!abandoned_ && !laid_ && has_entered(0, turn_)) decline();
}

bool OneShotFollower::free() {
  pass_over();
  return !abandoned_ && has_entered(0, turn_ - 1);
}

void OneShotFollower::enter(Number number, const What& what, const std::byte* input) {
  laid_ = true;
  publish(number, input, what.bytes());
}

bool OneShotFollower::take(const What& what, const std::byte*, std::byte* output) {
  if (!over()) return false;
  OneShotSlots::Slot& result = slot(0, turn_);
  laid_ = false;
  ++turn_;
  if (result.operation == 0) return false;
  if (const std::size_t bytes = what.bytes(); bytes > 0) std::memcpy(output, result.data(bytes), bytes);
  return true;
}

std::vector<OneShot::Number> OneShotFollower::awaited() {
  std::vector<Number> numbers;
  if (in_vain() || laid_) return numbers;
  pass_over();
  const OneShotSlots& leader = *slots_[0];
  if (leader.called.load() >= turn_) numbers.push_back(leader.called_for.load());
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (place != me_ && has_entered(place, turn_)) numbers.push_back(slot(place, turn_).operation);
  }
  return numbers;
}

void OneShotFollower::leave(int member) {
  OneShot::leave(member);
  leader_left_ |= member == members_[0];
}

std::vector<int> OneShotFollower::missing() const {
  if (abandoned_) return {};
  const std::uint64_t late = slots_[0]->late.load();
  return {late / ranks_ == turn_ ? static_cast<int>(late % ranks_) : members_[0]};
}

}  // namespace sordino
