#include "device/block_cache.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "base/error.h"

namespace sordino {
namespace {

constexpr std::size_t kLeast = 512, kLarge = std::size_t{2} << 20;

// Rounds up to one of few sizes, so that later requests can use the same blocks.
std::size_t size_for(std::size_t bytes) {
  if (bytes <= kLarge) return std::bit_ceil(std::max(bytes, kLeast));
  return (bytes + kLarge - 1) / kLarge * kLarge;
}

}  // namespace

std::byte* BlockCache::take(std::size_t bytes, Stream stream) {
  const std::size_t size = size_for(bytes);
  {
    std::lock_guard lock(mutex_);
    if (std::byte* data = take_again(size, stream)) return data;
  }
  std::byte* data = allocate_(size);
  if (data == nullptr) {
    free_unused();
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  taken_[data] = size;
  return data;
}

// Returns the smallest free block of at least `size` and less than 2 * size bytes whose work is done, or was put on the
// same stream. Null without such a block.
std::byte* BlockCache::take_again(std::size_t size, Stream stream) {
  for (auto found = free_blocks_.lower_bound(size); found != free_blocks_.end() && found->first < 2 * size; ++found) {
    const Block block = found->second;
    if (!block.busy->done()) {
      if (block.stream != stream) continue;
      device_.wait(stream, block.busy);  // a new stream may have the number of a destroyed one
    }
    taken_[block.data] = found->first;
    free_blocks_.erase(found);
    return block.data;
  }
  return nullptr;
}

void BlockCache::give_back(std::byte* data, Stream stream) noexcept {
  std::lock_guard lock(mutex_);
  const auto size = taken_.extract(data);
  try {
    free_blocks_.emplace(size.mapped(), Block{data, stream, device_.record(stream)});
  } catch (const Error&) {
    // The device has failed, and its memory is lost with it.
  }
}

void BlockCache::free_unused() {
  std::vector<std::byte*> unused;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(free_blocks_, [&](const auto& entry) {
      const bool over = entry.second.busy->done();
      if (over) unused.push_back(entry.second.data);
      return over;
    });
  }
  for (std::byte* data : unused) free_(data);
}

}  // namespace sordino
