// Gossip of flat parameters: in each segment every participant's values become an average of its own and some others',
// as a topology says, all from the values before the exchange.
#pragma once

#include <memory>

#include "arena/layout.h"
#include "collectives/request.h"
#include "topology/topology.h"
#include "transport/transport.h"

namespace sordino {

// Memory that arrives from other nodes, kept from one exchange to the next.
class Inbox {
 public:
  explicit Inbox(NodeMemory& memory) : memory_(memory) {}
  // Room for so many copies of `bytes` in memory of the device, or of the host if there is none, that the node shares
  // if `shared`. What lay in it may be lost.
  std::byte* reserve(std::size_t copies, std::size_t bytes, bool shared, const std::shared_ptr<Device>& device);
  std::size_t bytes() const { return bytes_; }

 private:
  NodeMemory& memory_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<std::byte[]> private_;
  std::shared_ptr<Device> device_;
  std::size_t bytes_ = 0;
};

// How device memory is exchanged: through the host's memory; as it is, where peers of the node map it and messages take
// it; or by NCCL.
enum class Passage : std::uint8_t { kHost, kDirect, kNccl };

struct Exchange {
  std::shared_ptr<const Layout> layout;  // the same on all participants; a segment's group is what topologies see
  std::shared_ptr<const topology::Topology> topology;
  std::uint64_t round;
  const std::byte* source;  // a layout's worth of values
  std::byte* result;        // where the averages go: `source` itself, or memory that does not overlap it
  // Whether source and result of *all* participants lie in memory that their nodes share.
  bool shared;
  Passage passage;   // of device memory; the same on all participants
  bool without_own;  // leave each participant's own values out of its averages
  std::shared_ptr<Inbox> inbox;
  // On this rank it begins when that is done, and fails if that failed: nobody need wait in between.
  std::shared_ptr<const Handle> after;
};

}  // namespace sordino
