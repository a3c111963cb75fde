// Waits of a rank, for `sordino inspect`: its unfinished operations, and the ranks that hold each up, as far as this
// rank knows. Another thread asks; the polling thread answers, because only that thread may read the state.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sordino {

struct Wait {
  enum class Stage {
    kCalled,     // `ranks` have not called it
    kUndecided,  // called here; only the rank in `ranks`, which coordinates it, knows which ranks have not called it
    kRunning,    // it moves data, and waits for `ranks`
    kOnDevice,   // its work is on the GPU
    kMessage,    // a message between two ranks
  };
  Stage stage;
  std::string what;  // such as "'allreduce.loss'"
  double seconds;    // since this rank called it, or heard of it
  std::vector<int> ranks;
};

class WaitsQuestion {
 public:
  // Answers a question, if there is one. Called by the polling thread about every 10 ms.
  template <class Waits>
  void answer(const Waits& waits) {
    if (!asked_.load(std::memory_order_acquire)) return;
    std::lock_guard lock(mutex_);
    answer_ = waits();
    asked_ = false;
    answered_.notify_all();
  }
  // From any other thread. nullopt if no thread polls within `limit`. `wake` is called once.
  std::optional<std::vector<Wait>> ask(std::chrono::milliseconds limit, const std::function<void()>& wake) {
    const std::lock_guard alone(askers_);
    std::unique_lock lock(mutex_);
    answer_.reset();
    asked_ = true;
    lock.unlock();
    wake();
    lock.lock();
    answered_.wait_for(lock, limit, [this] { return answer_.has_value(); });
    asked_ = false;
    return std::exchange(answer_, std::nullopt);
  }

 private:
  std::mutex askers_, mutex_;
  std::condition_variable answered_;
  std::atomic<bool> asked_{false};
  std::optional<std::vector<Wait>> answer_;
};

}  // namespace sordino
