// The data of operations in two turns (one_shot_node.h).
#include <algorithm>
#include <atomic>
#include <cstring>

#include "collectives/one_shot_node.h"
#include "collectives/shards.h"
#include "kernels/kernels.h"
#include "kernels/publish.h"

namespace sordino {
namespace {

// The ranks' shards of an all-reduce, in bytes.
class ByteShards {
 public:
  ByteShards(const Repeat& repeat, std::size_t ranks)
      : shards_(shards_of(static_cast<int>(ranks), repeat.what.dtype, repeat.recipe.most / size_of(repeat.what.dtype))),
        width_(size_of(repeat.what.dtype)) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      most_ = std::max(most_, repeat.recipe.most - bytes(rank));
      largest_ = std::max(largest_, bytes(rank));
    }
  }

  std::size_t begin(std::size_t rank) const { return shards_.begin(rank) * width_; }
  std::size_t end(std::size_t rank) const { return shards_.end(rank) * width_; }
  std::size_t bytes(std::size_t rank) const { return end(rank) - begin(rank); }
  // Place of a shard in what another rank publishes first: all but that rank's own shard.
  std::size_t place(std::size_t shard, std::size_t rank) const {
    return begin(shard) - (shard > rank ? bytes(rank) : 0);
  }
  std::size_t most() const { return most_; }  // that a rank publishes first
  std::size_t largest() const { return largest_; }

 private:
  const Shards shards_;
  const std::size_t width_;
  std::size_t most_ = 0, largest_ = 0;
};

// Reduces `bytes` bytes of each source to the destinations.
void reduce(const Repeat& repeat, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
            std::size_t bytes, kernels::Others others) {
  const Signature& what = repeat.what;
  const auto [op, post] = folding_of(what.op, what.dtype, what.postscale, static_cast<int>(sources.size()));
  kernels::reduce(op, what.dtype, sources, destinations, bytes / size_of(what.dtype), what.prescale, post, others);
}

}  // namespace

// ---- by shards

void OneShotNode::publish_shards(const Repeat& repeat, const std::byte* input) {
  const ByteShards shards(repeat, ranks_);
  std::byte* own = slots_[me_]->data(turn_, shards.most());
  const std::size_t begin = shards.begin(me_), end = shards.end(me_);
  kernels::publish(own, input, begin);
  kernels::publish(own + begin, input + end, repeat.recipe.published - end);
  publish(entry_);
}

void OneShotNode::fold_shard(const Repeat& repeat, const std::byte* input, std::byte* output) {
  const ByteShards shards(repeat, ranks_);
  sources_.resize(ranks_);
  for (std::size_t place = 0; place < ranks_; ++place)
    sources_[place] =
        place == me_ ? input + shards.begin(me_) : published(place, shards.most()) + shards.place(me_, place);
  std::byte* const results[] = {output + shards.begin(me_), slots_[me_]->data(turn_, shards.largest())};
  reduce(repeat, sources_, results, shards.bytes(me_), kernels::Others::kPublished);
}

void OneShotNode::take_shards(const Repeat& repeat, std::byte* output) const {
  const ByteShards shards(repeat, ranks_);
  for (std::size_t step = 1; step < ranks_; ++step) {
    const std::size_t place = (me_ + step) % ranks_;
    std::memcpy(output + shards.begin(place), published(place, shards.largest()), shards.bytes(place));
  }
}

// ---- by locations

OneShotNode::Offer OneShotNode::offer(const Repeat& repeat, const std::byte* input, const std::byte* output) const {
  const std::size_t bytes = repeat.recipe.published;
  if (bytes == 0) return {true, {}};
  // An all-reduce writes its result to all ranks' memory.
  if (repeat.what.opcode == Opcode::kAllreduce && input != output) return {false, {}};
  const Location place =
      repeat.by_kernel ? memory_.offer(input, bytes, NodeMemory::Sure::kNo) : memory_.locate(input, bytes);
  return {place.segment != 0, place};
}

const OneShotNode::Offer& OneShotNode::offer_of(std::size_t place) const {
  return *reinterpret_cast<const Offer*>(published(place, sizeof(Offer)));
}

bool OneShotNode::all_offered() const {
  for (std::size_t place = 0; place < ranks_; ++place) {
    if (!offer_of(place).reached) return false;
  }
  return true;
}

std::byte* OneShotNode::map(std::size_t place) const { return memory_.map(world_ranks_[place], offer_of(place).place); }

void OneShotNode::take_where_they_are(const Repeat& repeat, const std::byte* input, std::byte* output) {
  if (repeat.what.opcode == Opcode::kAllreduce) {
    reduce_in_place(repeat, output);
  } else if (repeat.recipe.folds) {
    sources_.resize(ranks_);
    for (std::size_t place = 0; place < ranks_; ++place) sources_[place] = place == me_ ? input : map(place);
    assemble(repeat.what, repeat.recipe, sources_, output);
  } else {
    copy_parts(repeat.recipe, input, output);
  }
}

void OneShotNode::copy_parts(const Recipe& recipe, const std::byte* input, std::byte* output) {
  std::size_t at = 0;
  for (std::size_t place = 0; place < me_; ++place) at += recipe.takes[place].bytes;
  // Each rank begins with itself, so that they do not all read the same memory.
  for (std::size_t step = 0; step < ranks_; ++step) {
    const std::size_t place = (me_ + step) % ranks_;
    if (place == 0) at = 0;
    const auto [begin, bytes] = recipe.takes[place];
    if (place == me_) {
      if (bytes > 0 && input + begin != output + at) std::memcpy(output + at, input + begin, bytes);
    } else if (bytes > 0) {
      Location from = offer_of(place).place;
      from.offset += begin;
      memory_.copy(world_ranks_[place], from, {output + at, bytes});
    }
    at += bytes;
  }
}

void OneShotNode::reduce_in_place(const Repeat& repeat, std::byte* data) {
  const ByteShards shards(repeat, ranks_);
  results_.resize(ranks_);
  for (std::size_t place = 0; place < ranks_; ++place)
    results_[place] = (place == me_ ? data : map(place)) + shards.begin(me_);
  sources_.assign(results_.begin(), results_.end());
  reduce(repeat, sources_, results_, shards.bytes(me_), kernels::Others::kOrdinary);
}

// Members whose memory may have changed since the first turn. All that was read before the call is valid if there are
// none.
std::vector<int> OneShotNode::who_gave_up() const {
  std::atomic_thread_fence(std::memory_order_acquire);
  std::vector<int> members;
  for (std::size_t place = 0; place < ranks_; ++place) {
    if (place != me_ && slots_[place]->gave_up.load() + 1 >= turn_) members.push_back(members_[place]);
  }
  return members;
}

}  // namespace sordino
