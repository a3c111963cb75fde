// Ranks that are processes, however they were started and whatever carries their bytes: those that can prove to share a
// machine use its memory, and a link (MPI's, UCX's) leads to all others. Without such a link all must share the
// machine.
#pragma once

#include <memory>

#include "base/config.h"
#include "transport/link.h"
#include "transport/meeting.h"
#include "transport/transport.h"

namespace sordino::process {

// Collective: the ranks compare what they are, find out who shares memory with whom, and link up. `far` makes the link
// to other nodes; without it a rank on another machine is a TransportError on all.
std::unique_ptr<Transport> meet(Meeting& meeting, const Comparison& comparison, const Config& config,
                                const LinkMaker& far = {});

}  // namespace sordino::process
