// Devices as Python holds them.
#pragma once

#include <memory>

#include "bindings/bindings.h"
#include "device/device.h"

namespace sordino::bindings {

struct PyDevice {
  std::shared_ptr<Device> device;
  // Called without arguments, gives the queue that the calling thread puts its work on: torch.cuda's current stream.
  py::object current_stream;

  Stream stream() const { return current_stream.is_none() ? 0 : current_stream().cast<Stream>(); }
};

// The device of an argument that may be None.
inline std::shared_ptr<Device> device_of(const PyDevice* device) { return device ? device->device : nullptr; }

}  // namespace sordino::bindings
