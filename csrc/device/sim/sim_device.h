// A device made of a thread: its queues run behind the caller's back as those of a GPU do, on memory that processes of
// one machine can share. So all that is done on GPUs can be done, and tested, where there is none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/device.h"

namespace sordino::sim {

// What a device is like.
struct Traits {
  bool shares = true;       // other processes can map its memory
  bool takes_nccl = false;  // the NCCL that is there works on simulated devices
  bool waits_for_words = true;
  std::size_t room = SIZE_MAX;  // bytes of memory
};

// Devices with the same ordinal are the same hardware, in whatever process. Stream 0 is the caller's own thread.
std::shared_ptr<Device> make_device(int ordinal, Traits traits = {});

// Memory that a simulated device has given out and not got back, in bytes.
std::size_t occupied(const Device& device);

// From now on whoever asks for an event of the device, or whether one has come, gets DeviceError.
void fail(Device& device);

// From now on, or no more, a queue is one that is captured.
void capture(Stream stream, bool on);

// Puts work on a queue that some simulated device gave out.
void enqueue(Stream stream, std::function<void()> work);

}  // namespace sordino::sim

// The same for what is not C++: a library that stands for NCCL.
extern "C" void sordino_sim_enqueue(void* stream, void (*work)(void*), void* argument);
