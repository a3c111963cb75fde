// Queues of the hardware, on which the work of streams runs, and points in them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

namespace on_cpu {

// A point in a stream.
class Marker {
 public:
  void reach() {
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }
  bool reached() const { return reached_.load(std::memory_order_acquire); }
  void wait() const { reached_.wait(false); }

 private:
  std::atomic<bool> reached_{false};
};

class HardwareQueue {
 public:
  explicit HardwareQueue(unsigned number);  // starts its thread, which never ends
  void put(std::function<void()> work);

 private:
  void run(unsigned number);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
};

}  // namespace on_cpu
