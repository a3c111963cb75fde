// A device: memory that is not the host's, and queues, on which work runs some time after the call that requested it.
// The core uses GPUs only through these classes. So it also runs on other implementations of them: a GPU (device/cuda)
// or threads of this process (device/sim).
//
// A function waits for the device only if its comment says so. Addresses of devices and of the host never overlap.
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
  virtual bool done() = 0;  // whether all work before it is done; throws DeviceError if the device has failed
};

class Device {
 public:
  virtual ~Device() = default;

  virtual int ordinal() const = 0;
  virtual std::string name() const = 0;
  // A number that is the same for the same hardware in every process; never 0.
  virtual std::uint64_t identity() const = 0;
  virtual Kernels& kernels() = 0;
  // Makes this the calling thread's current device, in the device's runtime, until the returned object is destroyed.
  virtual std::shared_ptr<void> use() = 0;
  // Whether work on the queue is recorded (in a CUDA graph) and not run.
  virtual bool capturing(Stream stream) = 0;
  // Whether NCCL works on the device's memory and queues.
  virtual bool takes_nccl() const = 0;
  // This library's queue, separate from queues that compute. Work on it may wait for events, but not itself for peers.
  virtual Stream queue() const = 0;
  // Further queues.
  virtual Stream make_queue() = 0;
  virtual void drop_queue(Stream queue) noexcept = 0;
  // Makes a queue for work that itself waits for peers; drop_waiting_queue() releases it. Returns nothing if half of
  // the hardware queues have such a queue already.
  //
  // The hardware has few queues (CUDA: 8 per process, or CUDA_DEVICE_MAX_CONNECTIONS), and each queue with work
  // occupies one. If all of them waited for peers, nothing else would run on the device, not even the work that those
  // peers wait for. The other half stays free for other work, and for work that waits for events of the waiting queues.
  std::optional<Stream> make_waiting_queue();
  void drop_waiting_queue(Stream queue) noexcept;

  // Returns zeroed memory, ready for any queue; free() releases it. Throws TransportError if there is no room, even
  // after all memory that is kept for later use has been freed.
  std::byte* allocate(std::size_t bytes);
  // Waits for all work on the device.
  virtual void free(std::byte* data) noexcept = 0;
  // Frees memory of allocate() once `unused` returns true: now, in a later call of this function, or when an allocation
  // finds no room. `unused` must not call the device.
  void free_when_unused(std::byte* data, std::function<bool()> unused);
  // Fills memory with zeros, independently of all queues. Waits until that is done.
  virtual void clear(std::byte* data, std::size_t bytes) = 0;
  // Returns temporary memory for work that is put on `stream` from now on. After give_back(), others use it only after
  // all work that is on the `stream` of that call. Throws TransportError as allocate() does.
  std::byte* take(std::size_t bytes, Stream stream);
  virtual void give_back(std::byte* data, Stream stream) noexcept = 0;
  // Sets a function that makes other owners in this process free device memory that they keep for later use. It is
  // called and destroyed while no mutex of the device is locked, and never copied: it may take Python's lock, and
  // threads that hold Python's lock call the device. If it throws an Error, the allocation's error has the text.
  void on_no_room(std::function<void()> make_room);
  // Shares memory of allocate(). Another process passes the ticket to open(), and the result to close(). share() and
  // open() throw TransportError if the machine does not allow this.
  virtual Ticket share(const std::byte* data) = 0;
  virtual std::byte* open(const Ticket& ticket) = 0;
  virtual void close(std::byte* data) noexcept = 0;  // call it before the owner frees the memory

  // Pins host memory, so that copies need no staging and kernels can access it. Unpin the memory before it is freed.
  // Returns false if the machine does not allow this: then copies are slower, and kernels cannot access the memory.
  virtual bool pin(std::byte* data, std::size_t bytes) = 0;
  virtual void unpin(std::byte* data) noexcept = 0;

  virtual std::shared_ptr<Event> record(Stream stream) = 0;
  // Waits for all work on the device, of all its users in this process.
  virtual void synchronize() = 0;
  // Work that is put on the queue from now on runs after the event.
  virtual void wait(Stream stream, const std::shared_ptr<Event>& event) = 0;
  // Whether a queue can write a word, and wait for one: a number in pinned host memory, which other devices may write.
  virtual bool waits_for_words() const = 0;
  // Writes the word after earlier work on the queue. A reader that sees the value also sees the results of that work.
  virtual void write_word(std::atomic<std::uint64_t>& word, std::uint64_t value, Stream stream) = 0;
  // Work that is put on the queue from now on runs once word - least, as a signed number, is not negative.
  virtual void wait_for_word(std::atomic<std::uint64_t>& word, std::uint64_t least, Stream stream) = 0;
  // Copies between any two addresses, of this device or the host.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Stream stream) = 0;

 protected:
  // Number of queues whose work can run at the same time.
  virtual int hardware_queues() const = 0;
  // As allocate() and take(), but without a retry. Return null if there is no room.
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

// A queue with shared owners. A queue of make_owned_queue() is dropped when its last reference is destroyed. So code
// that uses the queue later, for example to give back memory, keeps a reference.
using OwnedQueue = std::shared_ptr<const Stream>;
OwnedQueue make_owned_queue(std::shared_ptr<Device> device);

}  // namespace sordino
