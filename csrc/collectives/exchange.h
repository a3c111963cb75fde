// Gossip of flat parameters. In each segment, each participant's values become an average of its own and some other
// participants' values, as the topology says. All averages use the values from before the exchange.
#pragma once

#include <memory>

#include "arena/layout.h"
#include "collectives/receive_buffer.h"
#include "topology/topology.h"

namespace sordino {

// Route of device memory in an exchange: through the host's memory (kHost); directly, where node peers map it and
// messages take it (kDirect); or by NCCL.
enum class Route : std::uint8_t { kHost, kDirect, kNccl };

// An exchange, without its round: the same from one round to the next.
struct Exchange {
  std::shared_ptr<const Layout> layout;  // the same on all participants; topologies see the group of a segment
  std::shared_ptr<const topology::Topology> topology;
  const std::byte* source;  // values to exchange, placed as in the layout
  std::byte* result;        // where the averages go: `source` itself, or memory that does not overlap it
  // Whether source and result of *all* participants lie in memory that their nodes share.
  bool shared;
  bool without_own;  // leave each participant's own values out of its averages
  std::shared_ptr<ReceiveBuffer> buffer;
  Route route = Route::kHost;  // of device memory; the same on all participants
};

}  // namespace sordino
