// Handle with which other processes of the node open device memory: a cudaIpcMemHandle_t, or its simulated equivalent.
#pragma once

#include <array>
#include <cstddef>

namespace sordino {

using Ticket = std::array<std::byte, 64>;

}  // namespace sordino
