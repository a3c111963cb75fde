// Small programs that use the stand-in: each is a process of its own, because a fault ends the process.
#pragma once

#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "control.h"

namespace on_cpu_programs {

// Runs work in a process of its own. Returns what it has printed, and "ended well" if it has.
inline std::string outcome_of(const std::function<void()>& work, const std::vector<std::string>& variables = {}) {
  int pipe_ends[2];
  if (pipe(pipe_ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    dup2(pipe_ends[1], STDERR_FILENO);
    alarm(20);
    for (const std::string& variable : variables) putenv(const_cast<char*>(variable.c_str()));
    work();
    _exit(0);
  }
  close(pipe_ends[1]);
  std::string printed;
  char some[4096];
  for (ssize_t count; (count = read(pipe_ends[0], some, sizeof some)) > 0;) {
    printed.append(some, static_cast<std::size_t>(count));
  }
  close(pipe_ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return printed + (WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "ended well" : "");
}

inline void expect(const std::string& text, const std::function<void()>& work,
                   const std::vector<std::string>& variables = {}) {
  const std::string found = outcome_of(work, variables);
  CHECK(found.find(text) != std::string::npos, "expected:", text, "found:", found);
}

#define MUST(call)                                                        \
  do {                                                                    \
    if ((call) != cudaSuccess) on_cpu::fault("this call failed: " #call); \
  } while (false)
inline void must(bool holds, const char* what) {
  if (!holds) on_cpu::fault(what);
}

template <class Function>
Function* of_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  MUST(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result));
  return reinterpret_cast<Function*>(found);
}
inline void begin(int device = 0) {
  CUcontext context = nullptr;
  of_driver<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, device);
  of_driver<CUresult(CUcontext)>("cuCtxPushCurrent")(context);
}
inline cudaStream_t stream() {
  cudaStream_t made = nullptr;
  MUST(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, 0));
  return made;
}
inline cudaEvent_t recorded(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  MUST(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  MUST(cudaEventRecord(event, stream));
  return event;
}
inline cudaMemPool_t pool() {
  cudaMemPool_t made = nullptr;
  const cudaMemPoolProps wanted{cudaMemAllocationTypePinned, 0, {cudaMemLocationTypeDevice, 0}};
  MUST(cudaMemPoolCreate(&made, &wanted));
  return made;
}
inline std::byte* block(std::size_t bytes) {
  void* data = nullptr;
  MUST(cudaMalloc(&data, bytes));
  return static_cast<std::byte*>(data);
}
inline std::byte* from_pool(std::size_t bytes, cudaStream_t stream) {
  void* data = nullptr;
  MUST(cudaMallocFromPoolAsync(&data, bytes, pool(), stream));
  return static_cast<std::byte*>(data);
}
inline std::uint64_t* words() {
  static auto* page =
      static_cast<std::uint64_t*>(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  static const bool registered = cudaHostRegister(page, 4096, cudaHostRegisterMapped) == cudaSuccess;
  must(registered, "no words");
  return page;
}
using WordCall = CUresult(CUstream, CUdeviceptr, cuuint64_t, unsigned);
inline void wait_for_word(cudaStream_t stream, int k = 0) {
  of_driver<WordCall>("cuStreamWaitValue64")(stream, reinterpret_cast<CUdeviceptr>(words() + k), 1, 0);
}
inline void write_word(cudaStream_t stream, int k = 0) {
  of_driver<WordCall>("cuStreamWriteValue64")(stream, reinterpret_cast<CUdeviceptr>(words() + k), 1, 0);
}
inline std::uint64_t word(int k) { return std::atomic_ref(words()[k]).load(); }
inline void set_word(int k) { std::atomic_ref(words()[k]).store(1); }

}  // namespace on_cpu_programs
