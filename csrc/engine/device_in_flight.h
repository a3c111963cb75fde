// Work that a device still runs after its operation has ended on the host. It does not end by itself if a peer is lost
// or never comes.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/running.h"

namespace sordino {

class DeviceInFlight {
 public:
  DeviceInFlight(int rank, double stall_warn_s, double timeout_s)
      : rank_(rank), stall_warn_s_(stall_warn_s), timeout_s_(timeout_s) {}

  // Adds an operation that used NCCL or a barrier of queues, and has put all its work on the device.
  // `timeout_s`: its own limit in s; 0: the constructor's.
  void add(const Running& over, double timeout_s);
  // Removes work that has ended. Warns of work that takes long. Throws Timeout after a deadline, and the error of
  // failed work.
  void check(AwakeTime now);
  // Visits the operations that are in flight: name, seconds on the device, and the ranks that are furthest behind.
  void visit(AwakeTime now,
             const std::function<void(const std::string& name, double lasted, std::vector<int> late)>& visitor) const;
  // Marks the results of all work (or of the work on one communicator) as invalid.
  void give_up();
  void give_up(const nccl::Channel& channel);
  void clear();
  // From any thread. As of the last check().
  bool empty() const { return count_.load() == 0; }

 private:
  struct One {
    std::shared_ptr<nccl::Channel> channel;
    std::weak_ptr<QueueBarrier> barrier;
    std::vector<std::shared_ptr<Handle>> handles;
    std::string name;
    AwakeTime since;
    double timeout_s;
    bool warned = false, over = false;
  };

  const int rank_;
  const double stall_warn_s_, timeout_s_;
  std::vector<One> all_;
  std::atomic<std::size_t> count_{0};
};

}  // namespace sordino
