// Ranks as threads of one process: the transport of tests, and of runs with a single rank.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino::sim {

// Connected transports, one for each rank's node. Each may be used by a different thread, and dropping one before it
// said goodbye counts as its death for the others.
std::vector<std::unique_ptr<Transport>> make_world(const std::vector<int>& node_of);

}  // namespace sordino::sim
