// Whether a decision, which comes from another process, fits what this rank has asked for: what follows believes it.
#pragma once

#include <vector>

#include "engine/process_set.h"

namespace sordino {

// TransportError unless it does. `submissions` are those it is about; `newest_set` is the newest id that this rank
// knows.
void check_decision(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions,
                    int newest_set);

}  // namespace sordino
