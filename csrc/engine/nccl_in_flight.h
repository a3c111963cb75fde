// What NCCL has yet to do on the device when an operation is over for this rank: if a peer is lost, it will not end by
// itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/running.h"

namespace sordino {

class NcclInFlight {
 public:
  // An operation that has gone by NCCL and put all its work on the device.
  void add(const Running& over);
  // Forgets what has ended. Throws what has gone wrong, and Timeout if it lasts.
  void check(Time now, double timeout_s);
  // Its results, or those of one communicator, are nothing.
  void give_up();
  void give_up(const nccl::Channel& channel);
  void clear() { all_.clear(); }

 private:
  struct One {
    std::shared_ptr<nccl::Channel> channel;
    std::vector<std::shared_ptr<Handle>> handles;
    std::string name;
    Time since;
  };
  std::vector<One> all_;
};

}  // namespace sordino
