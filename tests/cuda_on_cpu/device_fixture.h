// The device under test, and small helpers of its test.
#pragma once

#include <cuda_runtime.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "check.h"
#include "control.h"
#include "device/cuda/cuda_device.h"

extern "C" const sordino::cuda::Plugin* sordino_cuda_plugin();

namespace sordino::on_cpu_test {

constexpr std::size_t kMiB = std::size_t{1} << 20;
inline std::shared_ptr<Device> gpu;

inline void a_while() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
inline void wait_for(Stream stream) {
  const auto end = gpu->record(stream);
  while (!end->done()) std::this_thread::yield();
}
inline bool holds(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
template <class Error>
std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}
inline void put(Stream stream, std::function<void()> work) {
  const auto here = gpu->use();
  cuda_on_cpu_enqueue(
      reinterpret_cast<void*>(stream),
      [](void* argument) {
        const std::unique_ptr<std::function<void()>> work(static_cast<std::function<void()>*>(argument));
        (*work)();
      },
      new std::function<void()>(std::move(work)));
}
// A stream that does not continue before open() is called.
struct Gate {
  explicit Gate(Stream stream) {
    put(stream, [open = open_] { open->wait(false); });
  }
  ~Gate() { open(); }
  void open() {
    *open_ = true;
    open_->notify_all();
  }
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};
// Memory of the host that devices reach.
struct Pinned {
  explicit Pinned(std::size_t bytes) : bytes(bytes) {
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    data = static_cast<std::byte*>(found);
    CHECK(gpu->pin(data, bytes));
  }
  ~Pinned() {
    gpu->unpin(data);
    munmap(data, bytes);
  }
  std::atomic<std::uint64_t>& word(std::size_t k) { return reinterpret_cast<std::atomic<std::uint64_t>*>(data)[k]; }
  std::size_t bytes;
  std::byte* data;
};
// No call may leave its device, its capture mode or its error behind.
inline void check_thread(const char* after) {
  CHECK(on_cpu::pushed_contexts() == 0, after);
  CHECK(cudaGetLastError() == cudaSuccess, after);
  auto mode = cudaStreamCaptureModeGlobal;
  cudaThreadExchangeStreamCaptureMode(&mode);
  CHECK(mode == cudaStreamCaptureModeGlobal, after);
}

}  // namespace sordino::on_cpu_test
