#include <cstring>

#include "collectives/one_shot_nodes.h"

namespace sordino {

// Declines turns that were over before this rank entered an input for them.
void OneShotFollower::pass_over() {
  while (!abandoned_ && !entered_ && has_entered(0, turn_)) decline();
}

// A rank of the node that is not through the last turn may still read this rank's slot of the turn before it.
bool OneShotFollower::free() {
  pass_over();
  bool through = !abandoned_;
  for (std::size_t place = 0; place < slots_.size(); ++place) through = through && has_entered(place, turn_ - 1);
  return through;
}

void OneShotFollower::enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input,
                            const std::byte*) {
  entered_ = true;
  publish(entry, input, repeat->recipe.published, repeat->recipe.most);
}

bool OneShotFollower::close() {
  if (!over()) return false;
  entered_ = false;
  return number_of(0, turn_++) != 0;
}

bool OneShotFollower::withdraw() {
  if (!withdraw_unless([this] { return slots_[0]->begun.load() >= turn_ || has_entered(0, turn_); })) return false;
  entered_ = false;
  ++turn_;
  return true;
}

bool OneShotFollower::deliver(const Repeat& repeat, const std::byte* input, std::byte* output) {
  if (repeat.blocks) {
    deliver_blocks(repeat, input, results_, output);
  } else if (const std::size_t bytes = repeat.recipe.published; bytes > 0) {
    std::memcpy(output, slots_[0]->data(turn_ - 1, bytes), bytes);
  }
  return true;
}

std::vector<OneShot::Number> OneShotFollower::awaited() {
  std::vector<Number> numbers;
  if (in_vain() || entered_) return numbers;
  pass_over();
  const OneShotSlots& leader = *slots_[0];
  if (leader.called.load() >= turn_) numbers.push_back(leader.called_for.load());
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (place != me_ && has_entered(place, turn_)) numbers.push_back(number_of(place, turn_));
  }
  return numbers;
}

void OneShotFollower::note_left(int member) {
  OneShot::note_left(member);
  leader_left_ |= member == members_[0];
}

std::vector<int> OneShotFollower::missing() const {
  if (abandoned_) return {};
  const std::uint64_t late = slots_[0]->late.load();
  return {late / ranks_ == turn_ ? static_cast<int>(late % ranks_) : members_[0]};
}

}  // namespace sordino
