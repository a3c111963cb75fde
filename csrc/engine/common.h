// State that the parts of a world's engine share.
#pragma once

#include <set>

#include "base/awake_clock.h"
#include "base/ledger.h"
#include "base/trace.h"
#include "engine/failure_latch.h"
#include "engine/peers.h"
#include "transport/traffic.h"
#include "transport/transport.h"

namespace sordino {

struct Common {
  explicit Common(Transport& transport) : transport(transport), peers(transport) {}

  Transport& transport;
  Peers peers;
  FailureLatch failure;
  TrafficCounters traffic;
  Trace trace;
  Ledger ledger;
  AwakeClock clock;            // for deadlines; ticked by the polling thread
  std::set<int> removed_sets;  // ids of removed process sets; used by the polling thread only
};

}  // namespace sordino
