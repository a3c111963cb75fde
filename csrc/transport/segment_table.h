// Table of this rank's segments, by address, and list of the segments freed since the last take_freed().
#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/location.h"

namespace sordino {

class SegmentTable {
 public:
  // `location`: how peers find the segment.
  void add(const std::byte* data, std::size_t bytes, Location location) {
    std::lock_guard lock(mutex_);
    location.segment = next_++;
    location.bytes = bytes;
    by_address_[data] = location;
  }
  void remove(const std::byte* data) {
    std::lock_guard lock(mutex_);
    auto found = by_address_.find(data);
    freed_.push_back(found->second.segment);
    by_address_.erase(found);
  }
  Location locate(const void* pointer, std::size_t bytes) {
    const auto* place = static_cast<const std::byte*>(pointer);
    std::lock_guard lock(mutex_);
    auto after = by_address_.upper_bound(place);
    if (after == by_address_.begin()) return {};
    const auto& [base, segment] = *std::prev(after);
    const auto offset = static_cast<std::size_t>(place - base);
    if (offset > segment.bytes || bytes > segment.bytes - offset) return {};
    Location location = segment;
    location.offset = offset;
    return location;
  }
  std::vector<std::uint64_t> take_freed() {
    std::lock_guard lock(mutex_);
    return std::exchange(freed_, {});
  }

 private:
  std::mutex mutex_;
  std::uint64_t next_ = 1;
  std::map<const std::byte*, Location> by_address_;
  std::vector<std::uint64_t> freed_;
};

}  // namespace sordino
