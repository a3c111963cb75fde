// Devices in Python.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "device/device.h"

namespace sordino::bindings {

struct PyDevice {
  std::shared_ptr<Device> device;
  // Called without arguments; returns the queue that the calling thread puts its work on: torch.cuda's current stream.
  py::object current_stream;
  // Owners of memory that the device may still read and write until their events are done.
  std::vector<std::pair<std::shared_ptr<Event>, py::object>> kept = {};

  Stream stream() const { return current_stream.is_none() ? 0 : current_stream().cast<Stream>(); }
  // As stream(), but throws UsageError if the stream is being captured. `what`: the beginning of the error message.
  Stream running_stream(const std::string& what) const;
  // Keeps the owner of some memory until the first release_kept() after the event is done.
  void keep_until(std::shared_ptr<Event> event, py::object owner);
  // Releases owners whose events are done. Called wherever operations of the device are started, polled and waited for.
  void release_kept() noexcept;
};

// The device of an argument that may be None.
inline std::shared_ptr<Device> device_of(const PyDevice* device) { return device ? device->device : nullptr; }

}  // namespace sordino::bindings
