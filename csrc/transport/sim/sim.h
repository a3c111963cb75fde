// Ranks as threads of one process: the transport of tests, and of runs with a single rank.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace sordino::sim {

struct Machines;

// What connects the ranks, and how to break it.
class Network {
 public:
  // One rank for each number, which is its node's.
  explicit Network(const std::vector<int>& node_of);

  // Connected transports. Each may be used by a different thread, and dropping one before it said goodbye counts as its
  // death for the others.
  std::vector<std::unique_ptr<Transport>> transports() const;

  // As if its process were killed: when it polls next, the others hear that it has ended, and it gets Evicted.
  void kill(int rank);
  // It stands still from its next poll on, or goes on.
  void stop(int rank, bool stopped);
  // What goes either way between these two waits until the link is whole again.
  void cut(int one, int other, bool is_cut);
  // Calls mapping(rank) whenever memory of that rank is to be mapped; what it throws is why it cannot be. Before any
  // is.
  void hinder(std::function<void(int rank)> mapping);
  // A transfer that could end goes on whenever late() says so. Before anything is sent.
  void delay(std::function<bool()> late);

 private:
  std::shared_ptr<Machines> machines_;
};

}  // namespace sordino::sim
