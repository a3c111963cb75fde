#include "collectives/one_shot_node.h"

#include <algorithm>

namespace sordino {

bool OneShotNode::all_entered(std::uint64_t turn) const {
  if (abandoned_) return false;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (!has_entered(place, turn)) return false;
  }
  return true;
}

// In a fold each rank computes on all inputs, so there is a limit on the bytes of all ranks, too. Where ranks share
// cores, computing costs less than a wait.
bool OneShotNode::carries(Repeat& repeat, const std::function<Recipe(std::size_t)>&) const {
  const Recipe& recipe = repeat.recipe;
  const std::size_t most_folded = (crowded_ ? 4 : 2) * OneShotSlots::kMostBytes;
  return recipe.most <= OneShotSlots::kMostBytes && (!recipe.folds || recipe.most * ranks_ <= most_folded);
}

void OneShotNode::enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input) {
  publish(entry, input, repeat->recipe.published, repeat->recipe.most);
}

bool OneShotNode::close() { return over() && agreed(turn_++); }

bool OneShotNode::agreed(std::uint64_t turn) const {
  const auto entry = [&](std::size_t place) { return Entry{counted(place, turn), slot(place, turn).after}; };
  const Entry first = entry(0);
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (entry(place) != first) return false;
  }
  return first.number != 0;
}

bool OneShotNode::withdraw() {
  if (!withdraw_unless([this] { return all_entered(turn_); })) return false;
  ++turn_;
  return true;
}

// Reads the slots of the last turn, so it must run before this rank publishes for the next turn.
void OneShotNode::deliver(const Repeat& repeat, const std::byte* input, std::byte* output) {
  sources_.resize(slots_.size());
  for (std::size_t place = 0; place < slots_.size(); ++place)
    sources_[place] = place == me_ ? input : slots_[place]->data(turn_ - 1, repeat.recipe.most);
  assemble(repeat.what, repeat.recipe, sources_, output);
}

std::vector<OneShot::Number> OneShotNode::awaited() {
  std::vector<Number> numbers;
  if (closed_ || slot(me_, turn_).stamp.load(std::memory_order_relaxed) >= turn_) return numbers;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (slot(place, turn_).stamp.load(std::memory_order_acquire) >= turn_) numbers.push_back(number_of(place, turn_));
  }
  return numbers;
}

std::vector<int> OneShotNode::missing() const {
  std::vector<int> members;
  if (abandoned_) return members;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (!has_entered(place, turn_)) members.push_back(members_[place]);
  }
  return members;
}

}  // namespace sordino
