// A device: memory that is not the host's, and queues on which work runs some time after the call that requested it.
// The core works on GPUs only through these classes. So it runs on anything that implements them: a GPU (device/cuda)
// or, without one, a thread of this process (device/sim).
//
// A function waits for the device only if its comment states it. Addresses of devices and of the host never overlap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/ticket.h"
#include "kernels/device_kernels.h"

namespace sordino {

// A point in a queue.
class Event {
 public:
  virtual ~Event() = default;
  virtual bool done() = 0;  // whether all work before it is over; throws DeviceError if the device has failed
};

class Device {
 public:
  virtual ~Device() = default;

  virtual int ordinal() const = 0;
  virtual std::string name() const = 0;
  // The same number for the same hardware in every process; never 0.
  virtual std::uint64_t identity() const = 0;
  virtual Kernels& kernels() = 0;
  // Makes this the current device of the calling thread, in the device's runtime, until the returned object is
  // destroyed.
  virtual std::shared_ptr<void> use() = 0;
  // Whether work on the queue is recorded for later (a CUDA graph) instead of run.
  virtual bool capturing(Stream stream) = 0;
  // Whether NCCL works on the device's memory and queues.
  virtual bool takes_nccl() const = 0;
  // This library's own queue, apart from those that compute. Work on it waits for peers only by way of an event.
  virtual Stream queue() const = 0;
  // Further queues.
  virtual Stream make_queue() = 0;
  virtual void drop_queue(Stream queue) noexcept = 0;
  // A further queue, for work that waits for peers itself; drop_waiting_queue() releases it. None if there are as many
  // as may wait at once.
  //
  // Hardware has few queues (CUDA: 8 per process, or CUDA_DEVICE_MAX_CONNECTIONS), and gives one to each queue that has
  // work. If all of them wait for peers, nothing else runs on the device, not even what those peers wait for. Half of
  // them stay free for other work and for what waits for an event of these queues.
  std::optional<Stream> make_waiting_queue();
  void drop_waiting_queue(Stream queue) noexcept;

  // Returns zeroed memory, ready for any queue; free() releases it. Throws TransportError if there is no room, even
  // after all memory that is kept for later has been given back.
  std::byte* allocate(std::size_t bytes);
  // Waits for all work on the device.
  virtual void free(std::byte* data) noexcept = 0;
  // Frees memory of allocate() that may still be in use: now, or in a later call that finds it unused. Such calls are
  // those of this function, and allocations that find no room.
  void free_when_unused(std::byte* data, std::function<bool()> unused);
  // Fills memory with zeros, independently of all queues. Waits until that is done.
  virtual void clear(std::byte* data, std::size_t bytes) = 0;
  // Temporary memory, for work that is put on `stream` from now on. give_back() lets others use it after the work that
  // is on its `stream` by then. Throws TransportError as allocate() does.
  std::byte* take(std::size_t bytes, Stream stream);
  virtual void give_back(std::byte* data, Stream stream) noexcept = 0;
  // Sets a function by which other owners in this process give back device memory that they keep for later. It is
  // called and destroyed while no mutex of the device is locked, and never copied: it may take Python's lock, and
  // threads that have Python's lock call the device. If it throws an Error, the error of the allocation has its text.
  void on_no_room(std::function<void()> make_room);
  // For memory of allocate(). Another process calls open() with the ticket, and close() on the result. share() and
  // open() throw TransportError if the machine does not allow it.
  virtual Ticket share(const std::byte* data) = 0;
  virtual std::byte* open(const Ticket& ticket) = 0;
  virtual void close(std::byte* data) noexcept = 0;  // must come before the owner frees the memory

  // Lets copies to and from host memory go directly, and kernels reach it. Unpin the memory before it is freed. Returns
  // false if the machine does not allow it: then copies work, more slowly, and kernels do not.
  virtual bool pin(std::byte* data, std::size_t bytes) = 0;
  virtual void unpin(std::byte* data) noexcept = 0;

  virtual std::shared_ptr<Event> record(Stream stream) = 0;
  // Waits for all work on the device, of all owners.
  virtual void synchronize() = 0;
  // Work that is put on the queue from now on runs after the event.
  virtual void wait(Stream stream, const std::shared_ptr<Event>& event) = 0;
  // Whether a queue can write to, and wait for, a number in pinned host memory, which other devices may write.
  virtual bool waits_for_words() const = 0;
  // Writes the word after earlier work on the queue: a reader that sees the word also sees that work.
  virtual void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) = 0;
  // Work that is put on the queue from now on runs once the word is at least `least`: once their difference, as a
  // signed number, is not negative.
  virtual void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) = 0;
  // Copies between any two places, on this device or the host.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) = 0;

 protected:
  // Number of queues that can have work at once, without one waiting for another.
  virtual int hardware_queues() const = 0;
  // As allocate() and take(), but a single attempt. Null if there is no room.
  virtual std::byte* try_allocate(std::size_t bytes) = 0;
  virtual std::byte* try_take(std::size_t bytes, Stream stream) = 0;

 private:
  struct Leftover {
    std::byte* data;
    std::function<bool()> unused;
  };
  std::byte* insist(std::size_t bytes, const std::function<std::byte*()>& attempt);
  std::string others_make_room();
  void free_unused();

  std::mutex mutex_;
  std::vector<Leftover> leftovers_;
  std::shared_ptr<const std::function<void()>> make_room_;  // shared, so that it is not copied under the mutex
  int waiting_queues_ = 0;
};

// A queue of the device with shared owners. With the last of them, a queue of make_owned_queue() is dropped. So a later
// use of the queue, such as giving back memory of its work, keeps a reference.
using OwnedQueue = std::shared_ptr<const Stream>;
OwnedQueue make_owned_queue(std::shared_ptr<Device> device);

}  // namespace sordino
