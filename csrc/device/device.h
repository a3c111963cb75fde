// A device is memory that is not the host's, and queues on which work runs some time after the call that asked for it.
// All that the core does on a GPU goes through these classes, so it runs on whatever can do the same: a GPU
// (device/cuda), or a thread of this process (device/sim), which is what there is where nobody has a GPU.
//
// Nothing here waits for the device but what says so. Addresses of devices and of the host never overlap.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/ticket.h"
#include "kernels/device_kernels.h"

namespace sordino {

// A place in a queue.
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
  // Makes this the calling thread's current device, as its runtime has it, until what is returned goes.
  virtual std::shared_ptr<void> use() = 0;
  // Whether what is put on the queue is recorded for later (a CUDA graph) rather than run.
  virtual bool capturing(Stream stream) = 0;
  // Whether NCCL works on its memory and queues.
  virtual bool takes_nccl() const = 0;
  // A queue of this library's own, beside those that compute. Nothing on it waits for peers but by way of an event.
  virtual Stream queue() const = 0;
  // Further ones, for what waits for them itself.
  virtual Stream make_queue() = 0;
  virtual void drop_queue(Stream queue) noexcept = 0;

  // Zeroed, and ready for any queue. TransportError when there is no room, even after all that is kept for later has
  // been given back.
  std::byte* allocate(std::size_t bytes);
  // Waits for all that is on the device.
  virtual void free(std::byte* data) noexcept = 0;
  // Frees memory of allocate() that others may still use, at once or when one of the next calls finds it unused: calls
  // of this function, and those that find no room.
  void free_when_unused(std::byte* data, std::function<bool()> unused);
  // Fills it with zeros, beside whatever is on queues; waits until that is done.
  virtual void clear(std::byte* data, std::size_t bytes) = 0;
  // Memory for a while: for what is put on a queue from now on, and free for others after what is on some queue when it
  // is given back. TransportError as from allocate().
  std::byte* take(std::size_t bytes, Stream stream);
  virtual void give_back(std::byte* data, Stream stream) noexcept = 0;
  // What has somebody else in this process give back the memory of the device that it keeps for later.
  void on_no_room(std::function<void()> make_room);
  // Of memory from allocate(). The other process calls open() with it, and close() on what that returned; both throw
  // TransportError where the machine does not allow it.
  virtual Ticket share(const std::byte* data) = 0;
  virtual std::byte* open(const Ticket& ticket) = 0;
  virtual void close(std::byte* data) noexcept = 0;  // before it is freed where it was allocated

  // Has copies to and from some host memory go straight, and kernels reach it; it must be unpinned before it goes.
  // False if the machine does not allow it: then copies work all the same, slower, and kernels do not.
  virtual bool pin(std::byte* data, std::size_t bytes) = 0;
  virtual void unpin(std::byte* data) noexcept = 0;

  virtual std::shared_ptr<Event> record(Stream stream) = 0;
  // Waits for all that is on the device, whoever put it there.
  virtual void synchronize() = 0;
  // What is put on the queue from now on runs after the event.
  virtual void wait(Stream stream, const std::shared_ptr<Event>& event) = 0;
  // Whether a queue can write to, and wait for, a number in pinned memory of the host, which other devices may write.
  virtual bool waits_for_words() const = 0;
  // What is on the queue before has been done, for all who see the word.
  virtual void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) = 0;
  // What is put on the queue from now on runs when the word is at least so much: when their difference, as a signed
  // number, is not below 0.
  virtual void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) = 0;
  // Between any two places, of this device or the host.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) = 0;

 protected:
  // As allocate() and take(), once; null when there is no room.
  virtual std::byte* try_allocate(std::size_t bytes) = 0;
  virtual std::byte* try_take(std::size_t bytes, Stream stream) = 0;

 private:
  struct Leftover {
    std::byte* data;
    std::function<bool()> unused;
  };
  std::byte* insist(std::size_t bytes, const std::function<std::byte*()>& attempt);
  void free_unused();

  std::mutex mutex_;
  std::vector<Leftover> leftovers_;
  std::function<void()> make_room_;
};

}  // namespace sordino
