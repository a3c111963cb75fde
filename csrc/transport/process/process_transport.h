// Transport between processes, independent of how they were started and of what carries their bytes. Ranks that can
// prove to share a machine use shared memory, and a link (MPI or UCX) reaches all others. Without such a link all ranks
// must share one machine.
#pragma once

#include <memory>

#include "base/config.h"
#include "transport/link.h"
#include "transport/meeting.h"
#include "transport/transport.h"

namespace sordino::process {

// Collective call: the ranks compare their settings, find out which of them share memory, and connect. `far` makes the
// link to other nodes. Without it, a rank on another machine causes a TransportError on all ranks.
std::unique_ptr<Transport> meet(Meeting& meeting, const Comparison& comparison, const Config& config,
                                const LinkMaker& far = {});

}  // namespace sordino::process
