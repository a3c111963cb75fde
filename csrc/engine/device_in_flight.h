// What devices have yet to do when an operation is over for the threads of its ranks: if a peer is lost, or never
// comes, it will not end by itself.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/running.h"

namespace sordino {

class DeviceInFlight {
 public:
  DeviceInFlight(int rank, double stall_warn_s, double timeout_s)
      : rank_(rank), stall_warn_s_(stall_warn_s), timeout_s_(timeout_s) {}

  // An operation that has gone by NCCL, or with a barrier of queues, and put all its work on the device.
  void add(const Running& over);
  // Forgets what has ended. Throws what has gone wrong, and Timeout if it lasts; before that, says so.
  void check(AwakeTime now);
  // Its results, or those of one communicator, are nothing.
  void give_up();
  void give_up(const nccl::Channel& channel);
  void clear();
  // From any thread: as far as check() has seen.
  bool empty() const { return count_.load() == 0; }

 private:
  struct One {
    std::shared_ptr<nccl::Channel> channel;
    std::weak_ptr<QueueBarrier> barrier;
    std::vector<std::shared_ptr<Handle>> handles;
    std::string name;
    AwakeTime since;
    bool warned = false, over = false;
  };

  const int rank_;
  const double stall_warn_s_, timeout_s_;
  std::vector<One> all_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace sordino
