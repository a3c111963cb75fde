#include "collectives/one_shot.h"

#include <algorithm>
#include <array>

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

void OneShot::lay(Number number, std::span<const std::byte> data) {
  if (!data.empty()) std::memcpy(slot(me_, turn_).data(data.size()), data.data(), data.size());
  publish(number);
}

void OneShot::publish(Number number) {
  OneShotSlots::Slot& own = slot(me_, turn_);
  own.operation = number;
  // In one order with all_laid() and `resting`: whoever rests has said so before it looks, or sees this stamp.
  own.stamp.store(turn_);
}

bool OneShot::all_laid(std::uint64_t turn) const {
  if (abandoned_) return false;
  for (std::size_t member = 0; member < slots_.size(); ++member) {
    if (slot(member, turn).stamp.load() < turn) return false;
  }
  return true;
}

bool OneShot::agreed() {
  const std::uint64_t turn = turn_++;
  const Number first = slot(0, turn).operation;
  for (std::size_t member = 1; member < slots_.size(); ++member) {
    if (slot(member, turn).operation != first) return false;
  }
  return first != 0;
}

void OneShot::fold(ReduceOp op, DType dtype, std::size_t count, double pre, double post, const std::byte* input,
                   std::byte* output) {
  const std::size_t bytes = count * size_of(dtype);
  sources_.resize(slots_.size());
  for (std::size_t member = 0; member < slots_.size(); ++member) {
    sources_[member] = member == me_ ? input : slot(member, turn_ - 1).data(bytes);
  }
  const std::array<std::byte*, 1> destinations{output};
  kernels::reduce(op, dtype, sources_, destinations, count, pre, post);
}

std::vector<OneShot::Number> OneShot::awaited() const {
  std::vector<Number> numbers;
  if (closed_ || slot(me_, turn_).stamp.load(std::memory_order_relaxed) >= turn_) return numbers;
  for (std::size_t member = 0; member < slots_.size(); ++member) {
    if (slot(member, turn_).stamp.load(std::memory_order_acquire) >= turn_)
      numbers.push_back(slot(member, turn_).operation);
  }
  return numbers;
}

void OneShot::decline() {
  publish(0);
  ++turn_;
}

std::vector<std::size_t> OneShot::missing() const {
  std::vector<std::size_t> members;
  if (abandoned_) return members;
  for (std::size_t member = 0; member < slots_.size(); ++member) {
    if (slot(member, turn_).stamp.load(std::memory_order_acquire) < turn_) members.push_back(member);
  }
  return members;
}

}  // namespace sordino
