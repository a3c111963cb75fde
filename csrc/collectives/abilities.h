// Abilities of a rank with the memory of its devices. Ranks tell each other, since an operation goes one way on all.
#pragma once

#include <cstdint>

namespace sordino {

// As bits.
using Abilities = std::uint8_t;
inline constexpr Abilities kMapsDevices = 1;   // map that of node peers, as far as this rank knows
inline constexpr Abilities kSendsDevices = 2;  // send and receive it by messages
inline constexpr Abilities kNccl = 4;
inline constexpr Abilities kNcclShared = 8;  // with several ranks on one device
inline constexpr Abilities kRunsAhead = 16;  // be done with an operation that the device has yet to do

}  // namespace sordino
