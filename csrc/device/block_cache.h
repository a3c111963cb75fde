// Temporary memory of a device without memory pools, such as some virtual GPUs: blocks that are kept and reused.
//
// give_back() cannot free a block: freeing waits for all work on the device, which may wait for peers, which may wait
// for the calling thread. So a block is freed only if there is no room, and after its work is done.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "device/device.h"

namespace sordino {

class BlockCache {
 public:
  // `allocate` returns null if there is no room. `free` waits for all work on the device.
  BlockCache(Device& device, std::function<std::byte*(std::size_t)> allocate, std::function<void(std::byte*)> free)
      : device_(device), allocate_(std::move(allocate)), free_(std::move(free)) {}
  BlockCache(const BlockCache&) = delete;
  BlockCache& operator=(const BlockCache&) = delete;

  // As Device::take() and give_back(). Any thread may call them. If there is no room, take() frees the blocks without
  // work and returns null. A block that is given back after the device has failed is lost.
  std::byte* take(std::size_t bytes, Stream stream);
  void give_back(std::byte* data, Stream stream) noexcept;

 private:
  struct Block {
    std::byte* data;
    Stream stream;                // stream on which it was given back
    std::shared_ptr<Event> busy;  // event that is done when its work is done
  };
  std::byte* take_again(std::size_t size, Stream stream);
  void free_unused();

  Device& device_;
  const std::function<std::byte*(std::size_t)> allocate_;
  const std::function<void(std::byte*)> free_;
  std::mutex mutex_;
  std::multimap<std::size_t, Block> free_blocks_;  // by size in bytes
  std::map<std::byte*, std::size_t> taken_;        // size in bytes
};

}  // namespace sordino
