// A device simulated by threads. Its queues run concurrently with the caller, like a GPU's, on memory that processes of
// one machine can share. So all code for GPUs can run, and be tested, without a GPU. Using a dropped queue throws
// DeviceError, which ends the process in functions that are noexcept.
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
  bool pools = true;            // it has memory pools; false: temporary memory comes from a BlockCache
  std::size_t room = SIZE_MAX;  // bytes of memory
  bool maps_others = true;      // open() maps the other process's memory; false: private memory instead
  int hardware_queues = 8;      // queues whose work can run at once; others wait
};

// Devices with the same ordinal are the same hardware, in all processes. Work on stream 0 runs in the calling thread.
std::shared_ptr<Device> make_device(int ordinal, Traits traits = {});

// Bytes of a simulated device that are allocated, with those that its cache holds.
std::size_t occupied(const Device& device);

// From now on, Device::record() and Event::done() of the device throw DeviceError.
void fail(Device& device);

// Sets whether a queue counts as being captured.
void capture(Stream stream, bool on);

// Puts work on a queue of any simulated device. Throws DeviceError if the queue was dropped.
void enqueue(Stream stream, std::function<void()> work);

}  // namespace sordino::sim

// The same with C linkage, for a library that replaces NCCL in tests.
extern "C" void sordino_sim_enqueue(void* stream, void (*work)(void*), void* argument);
