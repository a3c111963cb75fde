// Detour of an operation on device memory: a buffer that replaces its tensors, and the copies to and from it, on the
// operation's queue.
#pragma once

#include <memory>
#include <vector>

#include "collectives/compute.h"
#include "engine/running.h"

namespace sordino {

class Detour {
 public:
  Detour(Running& running, const std::shared_ptr<Device>& device, Where where);

  // Queues the copies of the inputs.
  void in();
  // Queues the copies of the outputs, and gives the tensors their own memory back.
  void out();

 private:
  // The tensors of one dtype.
  struct Run {
    std::size_t offset;
    std::vector<kernels::Span> inputs, outputs;
  };
  Stream queue() const { return *running_.queue; }
  bool at_once(const std::vector<kernels::Span>& tensors) const;

  Running& running_;
  const std::shared_ptr<Device>& device_;
  std::shared_ptr<StagingPool::Buffer> buffer_;
  std::vector<Run> runs_;
  std::vector<std::pair<Tensor*, Tensor>> originals_;
};

}  // namespace sordino
