// What a rank can do with the memory of its devices; ranks tell each other, since an operation goes one way on all.
#pragma once

#include <cstdint>
#include <mutex>

#include "base/config.h"
#include "device/device.h"
#include "transport/transport.h"

namespace sordino {

// As bits.
using Abilities = std::uint8_t;
inline constexpr Abilities kMapsDevices = 1;   // map that of node peers, as far as this rank knows
inline constexpr Abilities kSendsDevices = 2;  // send and receive it by messages
inline constexpr Abilities kNccl = 4;
inline constexpr Abilities kNcclShared = 8;  // with several ranks on one device
inline constexpr Abilities kRunsAhead = 16;  // be done with an operation that the device has yet to do

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
