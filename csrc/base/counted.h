// Counts an object, as long as it lives, in a counter that other threads may read.
#pragma once

#include <atomic>
#include <utility>

namespace sordino {

class Counted {
 public:
  Counted() = default;  // not counted
  explicit Counted(std::atomic<int>& counter) : counter_(&counter) { counter.fetch_add(1); }
  Counted(Counted&& other) noexcept : counter_(std::exchange(other.counter_, nullptr)) {}
  Counted& operator=(Counted&& other) noexcept {
    std::swap(counter_, other.counter_);
    return *this;
  }
  ~Counted() {
    if (counter_) counter_->fetch_sub(1);
  }

 private:
  std::atomic<int>* counter_ = nullptr;
};

}  // namespace sordino
