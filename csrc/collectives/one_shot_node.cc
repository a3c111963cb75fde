#include "collectives/one_shot_node.h"

#include <array>

#include "kernels/kernels.h"

namespace sordino {

bool OneShotNode::all_entered(std::uint64_t turn) const {
  if (abandoned_) return false;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (!has_entered(place, turn)) return false;
  }
  return true;
}

bool OneShotNode::take(const What& what, const std::byte* input, std::byte* output) {
  if (!over()) return false;
  const std::uint64_t turn = turn_++;
  if (!agreed(turn)) return false;
  fold(turn, what, input, output);
  return true;
}

bool OneShotNode::agreed(std::uint64_t turn) const {
  const Number first = slot(0, turn).operation;
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (slot(place, turn).operation != first) return false;
  }
  return first != 0;
}

// Reads the slots of this turn, so it must run before this rank publishes for the next turn.
void OneShotNode::fold(std::uint64_t turn, const What& what, const std::byte* input, std::byte* output) {
  const std::size_t bytes = what.bytes();
  sources_.resize(slots_.size());
  for (std::size_t place = 0; place < slots_.size(); ++place)
    sources_[place] = place == me_ ? input : slot(place, turn).data(bytes);
  const auto [op, post] = folding_of(what.op, what.postscale, static_cast<int>(ranks_));
  const std::array<std::byte*, 1> destinations{output};
  kernels::reduce(op, what.dtype, sources_, destinations, what.count(), what.prescale, post);
}

std::vector<OneShot::Number> OneShotNode::awaited() {
  std::vector<Number> numbers;
  if (closed_ || slot(me_, turn_).stamp.load(std::memory_order_relaxed) >= turn_) return numbers;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (slot(place, turn_).stamp.load(std::memory_order_acquire) >= turn_)
      numbers.push_back(slot(place, turn_).operation);
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
