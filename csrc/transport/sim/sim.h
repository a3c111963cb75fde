// Transport between threads of one process, for tests and for runs with a single rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino::sim {

struct Machines;

// Network that connects the ranks, and functions that break it.
class Network {
 public:
  // One rank for each element, which is the number of its node.
  explicit Network(const std::vector<int>& node_of);

  // Connected transports. Each may be used by a different thread. If one is destroyed before its rank has said goodbye,
  // the other ranks see the rank as dead.
  std::vector<std::unique_ptr<Transport>> transports() const;

  // Acts as if the process were killed: at its next poll() the rank gets Evicted, and the others see that it has ended.
  void kill(int rank);
  // Stops the rank at its next poll, or lets it continue.
  void stop(int rank, bool stopped);
  // Cuts or restores the link between two ranks. While it is cut, messages between them wait, in both directions.
  void cut(int one, int other, bool is_cut);
  // Calls mapping(rank) whenever memory of that rank is about to be mapped. If it throws, the mapping fails with its
  // exception. Call this before any memory is mapped.
  void hinder(std::function<void(int rank)> mapping);
  // A transfer that could complete stays unfinished while late() returns true. Call this before anything is sent.
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
