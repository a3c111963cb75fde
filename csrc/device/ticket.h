// How another process of this node finds device memory: a cudaIpcMemHandle_t, or what a simulated device has instead.
#pragma once

#include <array>
#include <cstddef>

namespace sordino {

using Ticket = std::array<std::byte, 64>;

}  // namespace sordino
