#include "hardware_queue.h"

#include <chrono>
#include <thread>
#include <utility>

#include "block.h"
#include "control.h"

namespace on_cpu {

HardwareQueue::HardwareQueue(unsigned number) {
  std::thread([this, number] { run(number); }).detach();
}

void HardwareQueue::put(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_one();
}

void HardwareQueue::run(unsigned number) {
  Random random(number);
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !work_.empty(); });
      work = std::move(work_.front());
      work_.pop_front();
    }
    // Late enough that a reader that should have waited, and did not, sees the values from before; and with a seed,
    // sometimes so late that other queues overtake this one.
    const bool late = order() != 0 && (random.next() ^ order()) % 8 == 0;
    std::this_thread::sleep_for(std::chrono::microseconds(late ? 400 : 10));
    work();
  }
}

}  // namespace on_cpu
