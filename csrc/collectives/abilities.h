// Abilities of a rank with its devices' memory. Ranks exchange them to choose the same route for an operation.
#pragma once

#include <cstdint>

namespace sordino {

// Set of the bits below.
using Abilities = std::uint8_t;
inline constexpr Abilities kMapsDevices = 1;   // maps the device memory of its node peers, as far as this rank knows
inline constexpr Abilities kSendsDevices = 2;  // sends and receives device memory by messages
inline constexpr Abilities kNccl = 4;
inline constexpr Abilities kNcclShared = 8;  // also where several ranks share a device
inline constexpr Abilities kRunsAhead = 16;  // completes an operation for the host before the device has run it

}  // namespace sordino
