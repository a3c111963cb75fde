// Transport between threads of one process, for tests and for runs with a single rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino::sim {

struct Machines;

// Network that connects the ranks, and ways to break it.
class Network {
 public:
  // One rank for each element, which is the number of its node.
  explicit Network(const std::vector<int>& node_of);

  // Connected transports. Each may be used by another thread. Destroying one before its rank said goodbye counts as the
  // rank's death for the others.
  std::vector<std::unique_ptr<Transport>> transports() const;

  // Acts as if the process were killed: at its next poll() the rank gets Evicted, and the others see that it has ended.
  void kill(int rank);
  // The rank stops at its next poll, or goes on.
  void stop(int rank, bool stopped);
  // Messages between these two ranks wait, in both directions, until the link is whole again.
  void cut(int one, int other, bool is_cut);
  // Calls mapping(rank) whenever memory of that rank is to be mapped; an exception that it throws is the reason why
  // that fails. Call this before any memory is mapped.
  void hinder(std::function<void(int rank)> mapping);
  // A transfer that could end stays unfinished while late() returns true. Call this before anything is sent.
  void delay(std::function<bool()> late);
  // Counts of what each rank has sent so far: control messages and transfers, also within nodes, but not through shared
  // memory.
  struct Sent {
    std::uint64_t messages, bytes;
  };
  std::vector<Sent> sent() const;

 private:
  std::shared_ptr<Machines> machines_;
};

}  // namespace sordino::sim
