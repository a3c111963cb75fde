#include "collectives/queue_barrier.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>

#include "base/awake_clock.h"
#include "base/error.h"

namespace sordino {
namespace {

constexpr std::chrono::milliseconds kAgain{1};
// Longer than any step takes. A device that needs longer for its queue hangs.
constexpr std::chrono::seconds kPatience{30};

// The largest word that is ahead of all stamps: devices compare by the sign of the difference.
constexpr std::uint64_t kEnd = INT64_MAX;

// Whether the work before the event is over. If the device has failed, it is.
bool over(Event& event) noexcept {
  try {
    return event.done();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

std::unique_ptr<QueueBarrier> QueueBarrier::make(const std::shared_ptr<Device>& device,
                                                 std::vector<SharedBlock*> blocks, std::vector<int> ranks, int me) {
  if (!device->waits_for_words() || blocks.size() > SharedBlock::kTold) return nullptr;
  const std::optional<Stream> queue = device->make_waiting_queue();
  if (!queue) return nullptr;
  std::unique_ptr<QueueBarrier> made(new QueueBarrier(device, *queue, std::move(blocks), std::move(ranks), me));
  for (SharedBlock* block : made->blocks_) {
    auto* page = reinterpret_cast<std::byte*>(block);
    if (!device->pin(page, SharedBlock::kOneShotBegin)) return nullptr;
    made->pinned_.push_back(page);
  }
  return made;
}

QueueBarrier::~QueueBarrier() {
  Deadline limit(kPatience);
  bool done = idle();
  while (!done && !limit.passed()) {
    std::this_thread::sleep_for(kAgain);
    done = idle();
  }
  stopping_ = true;
  if (letting_go_.joinable()) letting_go_.join();
  if (!done) return;  // the words stay pinned under a device that hangs
  for (std::byte* page : pinned_) pinned_by_->unpin(page);
  for (const auto& [device, queue] : queues_) device->drop_waiting_queue(queue);
}

Stream QueueBarrier::take_queue(const std::shared_ptr<Device>& device) {
  auto found = queues_.find(device);
  if (found == queues_.end()) {
    const std::optional<Stream> queue = device->make_waiting_queue();
    if (!queue) {
      throw DeviceError("a process set that has used another GPU before finds all queues of " + device->name() +
                        " in use by other process sets: use one GPU per rank (torch.cuda.set_device), set "
                        "CUDA_DEVICE_MAX_CONNECTIONS=32 before the program starts, or SORDINO_GPU_ROUTE=host");
    }
    found = queues_.emplace(device, *queue).first;
  }
  // The words of a rank must be written in order, so the new queue waits for the old one.
  if (device_ && device_ != device) device->wait(found->second, device_->record(queue_));
  device_ = device;
  queue_ = found->second;
  end_ = nullptr;
  return queue_;
}

void QueueBarrier::meet(std::span<const int> members, std::uint64_t stamp) {
  awaited_.assign(members.begin(), members.end());
  std::erase(awaited_, me_);
  stamp_ = stamp;
  // Each device writes to all peers before it waits for any, so that no peer waits for this device's waits.
  for (const int member : awaited_) {
    auto& word = blocks_[static_cast<std::size_t>(member)]->told[static_cast<std::size_t>(me_)];
    device_->write_word(word, stamp, queue_);
  }
  for (const int member : awaited_) device_->wait_for_word(told_by(member), stamp, queue_);
}

std::uint64_t QueueBarrier::progress_of(int member) const {
  const int reader = member == me_ ? awaited_.front() : me_;
  return blocks_[static_cast<std::size_t>(reader)]->told[static_cast<std::size_t>(member)].load(
      std::memory_order_acquire);
}

std::vector<int> QueueBarrier::late() const {
  std::vector<int> ranks;
  if (awaited_.empty()) return ranks;
  std::uint64_t least = progress_of(me_);
  for (const int member : awaited_) least = std::min(least, progress_of(member));
  if (least >= stamp_) return ranks;
  std::vector<int> all = awaited_;
  all.push_back(me_);
  std::sort(all.begin(), all.end());
  for (const int member : all) {
    if (progress_of(member) == least) ranks.push_back(ranks_[static_cast<std::size_t>(member)]);
  }
  return ranks;
}

std::vector<int> QueueBarrier::let_go() const {
  std::vector<int> ranks;
  for (std::size_t member = 0; member < blocks_.size(); ++member) {
    if (blocks_[member]->let_go.load(std::memory_order_acquire)) ranks.push_back(ranks_[member]);
  }
  return ranks;
}

// Stores the words repeatedly, because a peer's device may still overwrite them with a smaller stamp.
void QueueBarrier::abandon() noexcept {
  own().let_go.store(true, std::memory_order_release);
  if (letting_go_.joinable() || idle()) return;
  letting_go_ = std::thread([this, end = end_] {
    while (!stopping_ && !over(*end)) {
      for (std::size_t member = 0; member < blocks_.size(); ++member)
        told_by(static_cast<int>(member)).store(kEnd, std::memory_order_release);
      std::this_thread::sleep_for(kAgain);
    }
  });
}

bool QueueBarrier::idle() noexcept {
  if (!device_) return true;
  try {
    if (!end_) end_ = device_->record(queue_);
  } catch (const std::exception&) {
    return true;  // the device has failed
  }
  return over(*end_);
}

}  // namespace sordino
