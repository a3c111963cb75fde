// The ways that are open to operations on device memory, on this rank.
#pragma once

#include <mutex>
#include <string>

#include "base/config.h"
#include "collectives/abilities.h"
#include "device/device.h"
#include "transport/transport.h"

namespace sordino {

class DeviceRoutes {
 public:
  DeviceRoutes(const Transport& transport, const Config& config) : transport_(transport), allowed_(config.gpu_route) {}
  // From any thread.
  Abilities open_to(const Device& device) const;

 private:
  bool has_nccl() const;

  const Transport& transport_;
  const std::string allowed_;  // the only one, or empty
  mutable std::once_flag asked_nccl_;
  mutable bool has_nccl_ = false;
};

}  // namespace sordino
