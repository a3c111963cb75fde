// Memory of devices.
//
// Every block has addresses of its own, which are never used again, and pages around it that may not be touched. So an
// access behind a block, an access after it was freed in the order of its stream, and an access to memory of a pool
// before the allocation has come in the order of its stream, end the process with a message. Without
// CUDA_ON_CPU_PRETEND, the host may not touch device memory either: its pages are accessible only while work runs.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace on_cpu {

// Makes device memory accessible to this process while it lives.
class Shown {
 public:
  Shown();
  ~Shown();
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;
};

// Whether a word of 8 bytes is in memory that cudaHostRegister has registered.
bool is_registered(const void* data, std::size_t bytes);

}  // namespace on_cpu
