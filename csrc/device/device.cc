// Device memory: if there is no room, memory that is kept for later use is freed, and the allocation is retried.
#include "device/device.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace sordino {

std::optional<Stream> Device::make_waiting_queue() {
  {
    std::lock_guard lock(mutex_);
    if (waiting_queues_ >= hardware_queues() / 2) return std::nullopt;
    ++waiting_queues_;
  }
  try {
    return make_queue();
  } catch (...) {
    std::lock_guard lock(mutex_);
    --waiting_queues_;
    throw;
  }
}

void Device::drop_waiting_queue(Stream queue) noexcept {
  drop_queue(queue);
  std::lock_guard lock(mutex_);
  --waiting_queues_;
}

std::byte* Device::allocate(std::size_t bytes) {
  bytes = std::max<std::size_t>(bytes, 1);  // CUDA returns null for 0 bytes
  return insist(bytes, [&] { return try_allocate(bytes); });
}

std::byte* Device::take(std::size_t bytes, Stream stream) {
  bytes = std::max<std::size_t>(bytes, 1);
  return insist(bytes, [&] { return try_take(bytes, stream); });
}

std::byte* Device::insist(std::size_t bytes, const std::function<std::byte*()>& attempt) {
  if (std::byte* data = attempt()) return data;
  free_unused();
  const std::string done = others_make_room();
  if (std::byte* data = attempt()) return data;
  throw TransportError("no room for " + std::to_string(bytes) + " bytes on " + name() + ", " + done +
                       ". Use a smaller model or batch, or check whether another process uses the same GPU "
                       "(nvidia-smi)");
}

// Returns what it did, for an error message.
std::string Device::others_make_room() {
  std::shared_ptr<const std::function<void()>> make_room;
  {
    std::lock_guard lock(mutex_);
    make_room = make_room_;
  }
  try {
    if (make_room) (*make_room)();
  } catch (const Error& error) {
    return std::string("and PyTorch's cached memory could not be released: ") + error.what();
  }
  return "even after PyTorch's cached memory was released";
}

void Device::on_no_room(std::function<void()> make_room) {
  auto shared = std::make_shared<const std::function<void()>>(std::move(make_room));
  std::lock_guard lock(mutex_);
  make_room_.swap(shared);  // the previous function is destroyed after the mutex is unlocked
}

void Device::free_when_unused(std::byte* data, std::function<bool()> unused) {
  {
    std::lock_guard lock(mutex_);
    leftovers_.push_back({data, std::move(unused)});
  }
  free_unused();
}

void Device::free_unused() {
  std::vector<Leftover> over;
  {
    std::lock_guard lock(mutex_);
    const auto first = std::partition(leftovers_.begin(), leftovers_.end(),
                                      [](const Leftover& leftover) { return !leftover.unused(); });
    over.assign(std::make_move_iterator(first), std::make_move_iterator(leftovers_.end()));
    leftovers_.erase(first, leftovers_.end());
  }
  for (const Leftover& leftover : over) free(leftover.data);
}

OwnedQueue make_owned_queue(std::shared_ptr<Device> device) {
  const Stream made = device->make_queue();
  return {new Stream(made), [device = std::move(device)](const Stream* queue) {
            device->drop_queue(*queue);
            delete queue;
          }};
}

}  // namespace sordino
