#include "collectives/nccl_channel.h"

#include <bit>
#include <chrono>
#include <thread>

#include "base/awake_clock.h"
#include "base/error.h"
#include "base/keep.h"

namespace sordino::nccl {
namespace {

constexpr std::chrono::seconds kPatience{10};  // for the work left on the queue at the end

}  // namespace

Channel::~Channel() {
  if (communicator_->close() && finished()) {
    if (scratch_) device_->give_back(scratch_, *queue_);
  } else {
    leak_intentionally(queue_);
  }
}

bool Channel::finished() const noexcept {
  try {
    const auto over = device_->record(*queue_);
    Deadline limit(kPatience);
    while (!over->done()) {
      if (limit.passed()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return true;
  } catch (const Error&) {
    return false;  // the device has failed, and its memory is lost with it
  }
}

std::byte* Channel::scratch(std::size_t bytes) {
  if (bytes <= capacity_) return scratch_;
  if (scratch_) device_->give_back(scratch_, *queue_);
  scratch_ = nullptr;
  capacity_ = 0;
  const std::size_t capacity = std::bit_ceil(bytes);
  scratch_ = device_->take(capacity, *queue_);
  capacity_ = capacity;
  return scratch_;
}

}  // namespace sordino::nccl
