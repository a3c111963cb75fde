// Ranks as threads of one process: the transport of tests, and of runs with a single rank.
#pragma once

#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino::sim {

// `size` connected transports. Ranks are cut into nodes of `ranks_per_node` (0: all on one node). Each may be used by
// a different thread, and dropping one before it said goodbye counts as its death for the others.
std::vector<std::unique_ptr<Transport>> make_world(int size, int ranks_per_node);

}  // namespace sordino::sim
