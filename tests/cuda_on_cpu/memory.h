// Memory of devices.
//
// Every block has addresses of its own, which are never used again, and pages around it that may not be touched. So an
// access behind a block, an access after it was freed in the order of its stream, and an access to memory of a pool
// before the allocation has come in the order of its stream, end the process with a message. Without
// CUDA_ON_CPU_PRETEND, neither the host nor the kernels of other devices may touch the memory of a device: its pages
// are accessible only while work of this device runs, and copies.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace on_cpu {

// Makes the memory of a device, or of all devices, accessible to this process while it lives.
class Shown {
 public:
  static constexpr int kAll = -1;
  explicit Shown(int device);
  ~Shown();
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  const int device_;
};

// Returns addresses for a block, to be filled; null if there is no room. `pool`: it is freed by cudaFreeAsync.
std::byte* allocate(std::size_t bytes, bool pool, int device);
// Puts memory behind the addresses of a block. `fresh`: with arbitrary contents.
void fill(std::byte* data, bool fresh);
// Ends a block. A fault if it is not one of this kind, if it was written behind its end, or if another process has it
// open.
void discard(std::byte* data, bool pool, bool opened);

// Memory of cudaMalloc for other processes.
struct Ticket {
  pid_t process;
  int file;
  std::size_t bytes;
};
static_assert(sizeof(Ticket) <= sizeof(cudaIpcMemHandle_t));
// False if this is not the beginning of such memory.
bool share(const std::byte* data, Ticket& ticket);
// Null if there is no such memory.
std::byte* open_shared(const Ticket& ticket, int device);

// Memory of the host that devices reach. False if some of it is registered, or it is not.
bool register_host(std::byte* data, std::size_t bytes);
bool unregister_host(std::byte* data);
bool is_registered(const void* data, std::size_t bytes);

enum class Where { kDevice, kRegistered, kPageable };
// A fault if the bytes are device memory, and not all in one block.
Where where(const void* data, std::size_t bytes, const char* call);

}  // namespace on_cpu
