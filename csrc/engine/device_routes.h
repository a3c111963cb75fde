// The routes that this rank has for operations on device memory.
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
  // May be called from any thread.
  Abilities open_to(const Device& device) const;

 private:
  bool has_nccl() const;

  const Transport& transport_;
  const std::string allowed_;  // the only allowed route; empty: all
  mutable std::once_flag asked_nccl_;
  mutable bool has_nccl_ = false;
};

}  // namespace sordino
