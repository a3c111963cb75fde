// Settings of the stand-in, and functions by which tests control it.
//
// Variables of the environment:
//   CUDA_DEVICE_MAX_CONNECTIONS   queues of the hardware, 8 by default, as on an H100
//   CUDA_MODULE_LOADING           EAGER loads all kernels at the start, as in CUDA
//   CUDA_ON_CPU_DEVICES           number of GPUs, 2 by default
//   CUDA_ON_CPU_PRETEND           1: memory of the host stands for memory of the device as well. The host may touch
//   both,
//                                 stream 0 is the calling thread, and a process may open its own IPC handles
//   CUDA_ON_CPU_ORDER             seed of the order of threads, blocks and streams; 0, the default, is a fixed order
//   CUDA_ON_CPU_CALLS             folder for a file with the number of calls of each function of CUDA
#pragma once

#include <cstddef>
#include <string>

namespace on_cpu {

// Ends the process with a message: the program has done what CUDA forbids or leaves undefined.
[[noreturn]] void fault(const std::string& what);

std::size_t setting(const char* name, std::size_t otherwise);
bool pretends();

unsigned order();
void set_order(unsigned seed);

// Bytes of device memory; the initial value is 16 GiB.
void set_room(std::size_t bytes);
// Bytes that are allocated: by cudaMalloc, and from pools.
std::size_t occupied();
// Blocks of other processes that are open.
std::size_t opened_blocks();
// From now on cudaFuncGetAttributes returns this error (a cudaError_t), as where kernels are missing; 0 is none.
void set_image_error(int code);
// From now on cudaGetDeviceCount returns this error (a cudaError_t); 0 is none.
void set_driver_error(int code);
// Whether devices let streams wait for words.
void set_words(bool there);

// Contexts that the calling thread has pushed, and not popped.
std::size_t pushed_contexts();

struct Counters {
  unsigned long launches, blocks, threads, barriers, exchanges;
};
Counters counters();

// Counts a call of a function of CUDA.
void called(const char* function);

}  // namespace on_cpu

// Puts work of another library (NCCL's stand-in) on a stream.
extern "C" __attribute__((visibility("default"))) void cuda_on_cpu_enqueue(void* stream, void (*work)(void*),
                                                                           void* argument);
