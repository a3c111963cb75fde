// The CPU kernels, run on the queues of simulated devices.
#pragma once

#include <memory>

#include "device/device.h"

namespace sordino::sim {

std::unique_ptr<Kernels> make_kernels();

}  // namespace sordino::sim
