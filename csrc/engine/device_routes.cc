#include "engine/device_routes.h"

#include "transport/nccl/loader.h"

namespace sordino {

Abilities DeviceRoutes::open_to(const Device& device) const {
  const auto allowed = [this](const char* route) { return allowed_.empty() || allowed_ == route; };
  Abilities all = 0;
  if (allowed("ipc") && transport_.shares_memory()) all |= kMapsDevices;
  if (allowed("mpi") && transport_.takes_device_memory()) all |= kSendsDevices;
  if (allowed("nccl") && device.takes_nccl() && has_nccl()) all |= kNccl;
  if ((all & kNccl) && allowed_ == "nccl" && nccl::shares_devices()) all |= kNcclShared;
  return all;
}

bool DeviceRoutes::has_nccl() const {
  std::call_once(asked_nccl_, [this] { has_nccl_ = nccl::available(); });
  return has_nccl_;
}

}  // namespace sordino
