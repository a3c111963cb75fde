// Whether a decision, which comes from another process, fits what this rank has asked for: what follows believes it.
#pragma once

#include <functional>
#include <vector>

#include "engine/process_set.h"

namespace sordino {

// TransportError unless it does. `submissions` are those it is about; `is_free`: whether this rank can make a set of
// this id.
void check_decision(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions,
                    const std::function<bool(int)>& is_free);

}  // namespace sordino
