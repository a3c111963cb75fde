// What has ended a world: the first failure stays, and everything later raises it.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace sordino {

// From any thread.
class FailureLatch {
 public:
  // False if there is a failure already.
  bool latch(std::exception_ptr failure) {
    std::lock_guard lock(mutex_);
    if (failure_) return false;
    failure_ = std::move(failure);
    latched_ = true;
    return true;
  }
  bool latched() const { return latched_.load(); }
  std::exception_ptr failure() const {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  void rethrow() const {
    if (const std::exception_ptr latched = failure()) std::rethrow_exception(latched);
  }

  // It has failed, rather than been shut down: transfers may still be under way.
  bool broken() const { return broken_.load(); }
  void mark_broken() { broken_ = true; }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::atomic<bool> latched_{false}, broken_{false};
};

}  // namespace sordino
