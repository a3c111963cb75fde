// A device simulated by threads: its queues run behind the caller's back, like a GPU's, on memory that processes of one
// machine can share. So all that runs on GPUs can also run, and be tested, without one. A use of a queue that was
// dropped is a DeviceError, which ends the process where a function must not throw.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "device/device.h"

namespace sordino::sim {

// Properties of a simulated device.
struct Traits {
  bool shares = true;       // other processes can map its memory
  bool takes_nccl = false;  // the NCCL in use works on simulated devices
  bool waits_for_words = true;
  bool pools = true;            // it has memory pools; false: temporary memory is that of a BlockCache
  std::size_t room = SIZE_MAX;  // bytes of memory
  bool maps_others = true;      // open() maps the memory of another process; if not, other memory
  int hardware_queues = 8;      // queues that can have work at once; others wait until one is free
};

// Devices with the same ordinal are the same hardware, in all processes. Stream 0 is the caller's own thread.
std::shared_ptr<Device> make_device(int ordinal, Traits traits = {});

// Bytes of memory that a simulated device has given out and not got back.
std::size_t occupied(const Device& device);

// From now on, recording an event of the device, or asking whether one is done, throws DeviceError.
void fail(Device& device);

// Sets whether a queue counts as being captured.
void capture(Stream stream, bool on);

// Puts work on a queue that some simulated device gave out. Throws DeviceError if it was dropped.
void enqueue(Stream stream, std::function<void()> work);

}  // namespace sordino::sim

// The same for code that is not C++: a library that stands in for NCCL.
extern "C" void sordino_sim_enqueue(void* stream, void (*work)(void*), void* argument);
