// Gossip of flat parameters: in each segment every participant's values become an average of its own and some others',
// as a topology says, all from the values before the exchange.
#pragma once

#include <memory>

#include "arena/layout.h"
#include "collectives/receive_buffer.h"
#include "topology/topology.h"

namespace sordino {

// How device memory is exchanged: through the host's memory; as it is, where peers of the node map it and messages take
// it; or by NCCL.
enum class Route : std::uint8_t { kHost, kDirect, kNccl };

// What stays the same from one round to the next.
struct Exchange {
  std::shared_ptr<const Layout> layout;  // the same on all participants; a segment's group is what topologies see
  std::shared_ptr<const topology::Topology> topology;
  const std::byte* source;  // a layout's worth of values
  std::byte* result;        // where the averages go: `source` itself, or memory that does not overlap it
  // Whether source and result of *all* participants lie in memory that their nodes share.
  bool shared;
  bool without_own;  // leave each participant's own values out of its averages
  std::shared_ptr<ReceiveBuffer> buffer;
  Route route = Route::kHost;  // of device memory; the same on all participants
};

}  // namespace sordino
