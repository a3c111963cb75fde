// Staged tensors of an operation on device memory: a buffer that replaces them while it runs, and the copies to and
// from it, on the operation's queue.
#pragma once

#include <memory>
#include <vector>

#include "collectives/compute.h"
#include "engine/running.h"

namespace sordino {

class StagedTensors {
 public:
  StagedTensors(Running& running, const std::shared_ptr<Device>& device, Where where);

  // Queues the copies of the inputs.
  void copy_inputs();
  // Queues the copies of the outputs, and points the tensors back to their own memory.
  void copy_outputs();

 private:
  // The tensors of one dtype, and their offset in the buffer.
  struct OfDtype {
    std::size_t offset;
    std::vector<kernels::Span> inputs, outputs;
  };
  Stream queue() const { return *running_.queue; }
  bool copies_by_kernel(const std::vector<kernels::Span>& tensors) const;

  Running& running_;  // of the coroutine that has this object; it is not resumed once its operation is given up
  const std::shared_ptr<Device>& device_;
  std::shared_ptr<StagingPool::Buffer> buffer_;
  std::vector<OfDtype> runs_;
  std::vector<std::pair<Tensor*, Tensor>> originals_;
};

}  // namespace sordino
