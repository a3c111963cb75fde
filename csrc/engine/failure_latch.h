// The failure that has ended a world: the first one stays, and every later operation raises it.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

namespace sordino {

// May be used from any thread.
class FailureLatch {
 public:
  // Returns false if a failure is already latched.
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

  // The world has failed rather than been shut down: transfers may still be under way.
  bool broken() const { return broken_.load(); }
  void mark_broken() { broken_ = true; }

 private:
  mutable std::mutex mutex_;
  std::exception_ptr failure_;
  std::atomic<bool> latched_{false}, broken_{false};
};

}  // namespace sordino
