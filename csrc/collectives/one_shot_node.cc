#include "collectives/one_shot_node.h"

#include <algorithm>

#include "base/error.h"
#include "base/prefetch.h"
#include "collectives/node_pipeline.h"
#include "collectives/shared_tensors.h"

namespace sordino {

bool OneShotNode::all_entered(std::uint64_t turn) const {
  if (abandoned_) return false;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (!has_entered(place, turn)) return false;
  }
  return true;
}

// If inputs are folded, each rank computes on all of them, so there is a limit on the bytes of all ranks, too. Where
// ranks share cores, computing costs less than a wait.
Repeat::Published OneShotNode::publishes(Repeat& repeat,
                                         const std::function<Recipe(std::size_t member)>& recipe_of) const {
  using Published = Repeat::Published;
  const Recipe& recipe = repeat.recipe;
  const bool is_allreduce = repeat.what.opcode == Opcode::kAllreduce;
  if (repeat.direct) {
    std::vector<std::size_t> given(ranks_);  // by giver: bytes of the largest part that another rank takes
    for (std::size_t taker = 0; taker < ranks_; ++taker) {
      const Recipe theirs = recipe_of(taker);
      for (std::size_t giver = 0; giver < ranks_; ++giver) {
        if (giver != taker) given[giver] = std::max(given[giver], theirs.takes[giver].bytes);
      }
    }
    const std::size_t most = *std::max_element(given.begin(), given.end());
    const auto givers = static_cast<int>(ranks_) - static_cast<int>(std::count(given.begin(), given.end(), 0));
    const bool taken_once = repeat.what.opcode == Opcode::kAlltoall || ranks_ == 2;
    repeat.by_kernel = !recipe.folds && is_for_kernel(most, givers, taken_once);
    if (most >= kLeastInPlace) return Published::kLocations;
  }
  const std::size_t most_folded = (crowded_ ? 4 : 2) * OneShotSlots::kMostBytes;
  if (recipe.most <= OneShotSlots::kMostBytes && (!recipe.folds || recipe.most * ranks_ <= most_folded))
    return Published::kInputs;
  return is_allreduce && recipe.most <= OneShotSlots::kMostInShards ? Published::kShards : Published::kNothing;
}

std::size_t OneShotNode::most_of(const Repeat& repeat) const {
  return repeat.published == Repeat::Published::kLocations ? sizeof(Offer) : repeat.recipe.most;
}

void OneShotNode::enter(std::shared_ptr<const Repeat> repeat, Entry entry, const std::byte* input,
                        const std::byte* output) {
  repeat_ = std::move(repeat);
  entry_ = entry;
  if (repeat_->published == Repeat::Published::kShards) return publish_shards(*repeat_, input);
  if (repeat_->published != Repeat::Published::kLocations)
    return publish(entry, input, repeat_->recipe.published, repeat_->recipe.most);
  const Offer own = offer(*repeat_, input, output);
  publish(entry, reinterpret_cast<const std::byte*>(&own), sizeof(own), sizeof(own));
}

bool OneShotNode::close() {
  if (!over()) return false;
  const bool have_agreed = agreed(turn_++);
  prefetch_to_write(&slot(me_, turn_));  // peers read it two turns ago
  if (halfway_) {
    halfway_ = have_agreed;
    return have_agreed;
  }
  return have_agreed && (repeat_->published != Repeat::Published::kLocations || all_offered());
}

bool OneShotNode::agreed(std::uint64_t turn) const {
  const auto entry = [&](std::size_t place) { return Entry{counted(place, turn), slot(place, turn).after}; };
  const Entry first = entry(0);
  for (std::size_t place = 1; place < slots_.size(); ++place) {
    if (entry(place) != first) return false;
  }
  return first.number != 0;
}

bool OneShotNode::withdraw() {
  if (halfway_ || !withdraw_unless([this] { return all_entered(turn_); })) return false;
  ++turn_;
  return true;
}

// Reads the slots of the last turn, so it must run before this rank publishes for the next turn.
bool OneShotNode::deliver(const Repeat& repeat, const std::byte* input, std::byte* output) {
  if (!repeat.in_two_turns()) {
    assemble_published(repeat, input, output);
    return true;
  }
  const bool by_shards = repeat.published == Repeat::Published::kShards;
  if (halfway_) {
    if (by_shards) take_shards(repeat, output);
    halfway_ = false;
    return true;
  }
  halfway_ = true;
  if (by_shards) {
    fold_shard(repeat, input, output);
    publish(entry_);
    return false;
  }
  Entry next = entry_;
  try {
    if (who_gave_up().empty()) take_where_they_are(repeat, input, output);
  } catch (const NotCopied&) {
    next = {};
  }
  if (who_gave_up().empty()) publish(next);
  return false;
}

void OneShotNode::assemble_published(const Repeat& repeat, const std::byte* input, std::byte* output) {
  sources_.resize(slots_.size());
  for (std::size_t place = 0; place < slots_.size(); ++place)
    sources_[place] = place == me_ ? input : published(place, repeat.recipe.most);
  assemble(repeat.what, repeat.recipe, sources_, output);
}

std::vector<OneShot::Number> OneShotNode::awaited() {
  std::vector<Number> numbers;
  if (closed_ || halfway_ || slot(me_, turn_).stamp.load(std::memory_order_relaxed) >= turn_) return numbers;
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (slot(place, turn_).stamp.load(std::memory_order_acquire) >= turn_) numbers.push_back(number_of(place, turn_));
  }
  return numbers;
}

std::vector<int> OneShotNode::missing() const {
  std::vector<int> members;
  if (abandoned_) return members;
  if (halfway_ && !has_entered(me_, turn_)) return who_gave_up();
  for (std::size_t place = 0; place < slots_.size(); ++place) {
    if (!has_entered(place, turn_)) members.push_back(members_[place]);
  }
  return members;
}

}  // namespace sordino
