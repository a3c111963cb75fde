// The stand-in itself: what it must refuse, and the facts that were measured on an H100 (driver 580, CUDA 13.0). Each
// test is a process of its own, because a fault ends the process.
#include <cuda_runtime.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "programs.h"

namespace {

using namespace on_cpu_programs;

constexpr unsigned kAll = ~0u;
__global__ void nothing() {}
__global__ void write_byte(std::byte* at) { *at = std::byte{1}; }
__global__ void leave_before_barrier() {
  if (threadIdx.x == 3) return;
  __syncthreads();
}
__global__ void two_barriers() {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void lane_missing() {
  if (threadIdx.x != 7) __shfl_down_sync(kAll, 1, 1);
}
__global__ void wrong_mask() { __shfl_down_sync(0xffffu, 1, 1); }
__global__ void different_exchanges() {
  if (threadIdx.x % 2 == 0) {
    __shfl_xor_sync(kAll, 1, 2);
  } else {
    __shfl_xor_sync(kAll, 1, 2);
  }
}
__global__ void exchanges(int* found) {
  __shared__ int sum;
  const int t = static_cast<int>(threadIdx.x);
  if (t == 0) sum = 0;
  __syncthreads();
  int all = t;
  for (int distance = 16; distance > 0; distance /= 2) all += __shfl_xor_sync(kAll, all, distance);
  const bool good = __shfl_sync(kAll, t, 5) % 32 == 5 && (__shfl_up_sync(kAll, t, 1) == t - (t % 32 != 0)) &&
                    __shfl_down_sync(kAll, t, 1) == t + (t % 32 != 31) &&
                    __ballot_sync(kAll, t % 2 == 1) == 0xaaaaaaaau && __any_sync(kAll, t % 32 == 9) &&
                    !__all_sync(kAll, t % 32 == 9) && __all_sync(kAll, true);
  __syncwarp();
  if (t % 32 == 0) atomicAdd(&sum, good ? all : 0);
  __syncthreads();
  if (t == 0) found[blockIdx.x] = sum;
}

template <class... P>
cudaError_t run(void (*kernel)(P...), unsigned blocks, unsigned threads, std::size_t shared, cudaStream_t stream,
                P... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads), pointers, shared, stream);
}

// Whether a call ends while it should wait: not within half a second, and only after `let_go`.
bool waits(const std::function<void()>& call, const std::function<void()>& let_go) {
  auto over = std::async(std::launch::async, [&] {
    begin();
    call();
  });
  const bool waited = over.wait_for(std::chrono::milliseconds(200)) == std::future_status::timeout;
  let_go();
  over.wait();
  return waited;
}

// ---- tests ---------------------------------------------------------------------------------------------------------

void kernels_are_checked() {
  const auto launching = [](auto kernel, unsigned threads) {
    return [=] {
      begin();
      MUST(run(kernel, 2, threads, 0, stream()));
      MUST(cudaDeviceSynchronize());
    };
  };
  expect("a thread of a block has ended, and others wait", launching(leave_before_barrier, 64),
         {"CUDA_ON_CPU_ORDER=1"});
  expect("different barriers", launching(two_barriers, 64));
  expect("lane has ended", launching(lane_missing, 32));
  expect("outside of the mask", launching(wrong_mask, 32));
  expect("the mask of an exchange has lanes that are not there", launching(different_exchanges, 31));
  expect("different exchanges", launching(different_exchanges, 32));
  for (const char* order : {"CUDA_ON_CPU_ORDER=0", "CUDA_ON_CPU_ORDER=1", "CUDA_ON_CPU_ORDER=2"}) {
    expect("ended well",
           [] {
             begin();
             int* found = reinterpret_cast<int*>(block(4 * sizeof(int)));
             int results[4] = {};
             MUST(run(exchanges, 4, 96, 0, stream(), found));
             MUST(cudaDeviceSynchronize());
             MUST(cudaMemcpyAsync(results, found, sizeof results, cudaMemcpyDefault, stream()));
             MUST(cudaDeviceSynchronize());
             for (const int sum : results) must(sum == 95 * 96 / 2, "a wrong sum");
           },
           {order});
  }
}

void launches_have_limits() {
  expect("ended well", [] {
    begin();
    const cudaStream_t at = stream();
    must(run(nothing, 0, 32, 0, at) == cudaErrorInvalidConfiguration, "no blocks");
    must(run(nothing, 1, 0, 0, at) == cudaErrorInvalidConfiguration, "no threads");
    must(run(nothing, 1, 1025, 0, at) == cudaErrorInvalidConfiguration, "too many threads");
    must(run(nothing, 1, 32, (48 << 10) + 1, at) == cudaErrorInvalidValue, "too much shared memory");
    must(cudaGetLastError() == cudaErrorInvalidValue && cudaGetLastError() == cudaSuccess, "the last error");
    MUST(run(nothing, 1, 1024, 48 << 10, at));
  });
}

void memory_is_checked() {
  const auto touching = [](auto prepare) {
    return [=] {
      begin();
      const cudaStream_t at = stream();
      MUST(run(write_byte, 1, 1, 0, at, prepare(at)));
      MUST(cudaDeviceSynchronize());
    };
  };
  expect("ended well", touching([](cudaStream_t at) { return from_pool(100, at) + 99; }));
  expect("outside of any block", touching([](cudaStream_t) { return block(1000) + 1024; }));
  expect("freed before", touching([](cudaStream_t at) {
           std::byte* data = from_pool(100, at);
           MUST(cudaFreeAsync(data, at));
           return data;
         }));
  expect("freed before", touching([](cudaStream_t) {
           std::byte* data = block(100);
           MUST(cudaFree(data));
           return data;
         }));
  expect("before its allocation in the order of the stream", touching([](cudaStream_t) {
           const cudaStream_t other = stream();
           wait_for_word(other);
           return from_pool(100, other);
         }),
         {"CUDA_MODULE_LOADING=EAGER"});
#if defined(__SANITIZE_ADDRESS__)
  const char* found = "use-after-poison";  // when it happens
#else
  const char* found = "a byte behind a block";  // when the block is freed
#endif
  expect(found, [] {
    begin();
    const cudaStream_t at = stream();
    std::byte* data = block(100);
    MUST(run(write_byte, 1, 1, 0, at, data + 100));
    MUST(cudaFree(data));
  });
  expect("of the host, or of another device,", [] {
    begin();
    *block(100) = std::byte{1};
  });
  expect("of the host, or of another device,", [] {
    begin();
    std::byte* data = block(100);
    begin(1);
    MUST(run(write_byte, 1, 1, 0, stream(), data));
    MUST(cudaDeviceSynchronize());
  });
  expect("ended well", [] { begin(), *block(100) = std::byte{1}; }, {"CUDA_ON_CPU_PRETEND=1"});
  expect("not all in one block", [] {
    begin();
    char host[8] = {};
    cudaMemcpyAsync(block(4), host, 8, cudaMemcpyDefault, stream());
  });
  expect("memory is freed that is not allocated", [] {
    begin();
    cudaFree(block(100) + 1);
  });
  expect("by cudaFree, or other memory by cudaFreeAsync", [] {
    begin();
    const cudaStream_t at = stream();
    std::byte* data = from_pool(100, at);
    MUST(cudaDeviceSynchronize());
    cudaFree(data);
  });
  expect("ended well", [] {  // measured: nothing is null, and no error
    begin();
    must(block(0) == nullptr && from_pool(0, stream()) == nullptr, "zero bytes");
    char host[] = "early";
    std::byte* data = block(6);
    const cudaStream_t at = stream();
    wait_for_word(at);
    MUST(cudaMemcpyAsync(data, host, 6, cudaMemcpyDefault, at));
    host[0] = 'l';  // pageable memory has been copied already
    set_word(0);
    MUST(cudaMemcpyAsync(words() + 8, data, 6, cudaMemcpyDefault, at));
    MUST(cudaDeviceSynchronize());
    must(std::strcmp(reinterpret_cast<const char*>(words() + 8), "early") == 0, "staged too late");
  });
}

void handles_are_checked() {
  expect("without a current device", [] { block(1); });
  expect("a stream that has been destroyed", [] {
    begin();
    const cudaStream_t gone = stream();
    MUST(cudaStreamDestroy(gone));
    run(nothing, 1, 1, 0, gone);
  });
  expect("a stream of another device", [] {
    begin();
    const cudaStream_t other = stream();
    begin(1);
    run(nothing, 1, 1, 0, other);
  });
  expect("never recorded", [] {
    begin();
    cudaEvent_t event = nullptr;
    MUST(cudaEventCreateWithFlags(&event, 0));
    cudaStreamWaitEvent(stream(), event, 0);
  });
  expect("an event that has been destroyed", [] {
    begin();
    const cudaEvent_t event = recorded(stream());
    MUST(cudaEventDestroy(event));
    cudaEventQuery(event);
  });
  expect("ended well", [] {
    begin();
    const cudaStream_t captured = stream();
    MUST(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
    must(cudaEventQuery(recorded(stream())) == cudaErrorStreamCaptureUnsupported, "a query is allowed");
    must(cudaStreamEndCapture(captured, nullptr) == cudaErrorStreamCaptureInvalidated, "the capture is whole");
  });
}

// With N streams in cuStreamWaitValue64, a write on another one does not come through.
void waits_use_up_hardware_queues() {
  for (const auto& [variable, most] :
       {std::pair{"", 8}, {"CUDA_DEVICE_MAX_CONNECTIONS=4", 4}, {"CUDA_DEVICE_MAX_CONNECTIONS=32", 32}}) {
    for (const int waiting : {most - 1, most}) {
      const std::string wanted = waiting < most ? "ended well" : "the write has not come";
      expect(wanted,
             [waiting] {
               begin();
               for (int k = 0; k < waiting; ++k) wait_for_word(stream(), 2);
               write_word(stream(), 1);
               for (int turn = 0; turn < (waiting % 2 == 0 ? 100 : 1000) && word(1) == 0; ++turn) {
                 std::this_thread::sleep_for(std::chrono::milliseconds(2));
               }
               must(word(1) == 1, "the write has not come");
             },
             {variable});
    }
  }
}

void some_calls_wait_for_the_device() {
  expect("ended well", [] {
    begin();
    words();
    static std::byte page[8192];
    const cudaStream_t held = stream(), other = stream();
    std::byte* data = block(100);
    MUST(cudaHostRegister(page, 4096, cudaHostRegisterMapped));
    int k = 2;
    const auto must_wait = [&](const char* name, const std::function<void()>& call) {
      wait_for_word(held, ++k);
      must(waits(call, [&] { set_word(k); }), name);
    };
    must_wait("cudaFree", [&] { MUST(cudaFree(data)); });
    must_wait("cudaHostUnregister", [&] { MUST(cudaHostUnregister(page)); });
    must_wait("cudaDeviceSynchronize", [&] { MUST(cudaDeviceSynchronize()); });
    must_wait("the first launch", [&] { MUST(run(nothing, 1, 1, 0, other)); });
    wait_for_word(held, ++k);
    // None of these waits.
    MUST(run(nothing, 1, 1, 0, other));
    cudaFuncAttributes attributes;
    MUST(cudaFuncGetAttributes(&attributes, write_byte));
    data = block(100);
    MUST(run(write_byte, 1, 1, 0, other, data));
    std::byte* lent = from_pool(100, other);
    MUST(cudaFreeAsync(lent, other));
    MUST(cudaMemPoolTrimTo(pool(), 0));
    MUST(cudaHostRegister(page, 4096, cudaHostRegisterMapped));
    MUST(cudaMemcpyAsync(data, page, 100, cudaMemcpyDefault, other));
    MUST(cudaMemcpyAsync(page + 4096, data, 100, cudaMemcpyDefault, other));
    MUST(cudaMemsetAsync(data, 0, 100, other));
    cudaIpcMemHandle_t handle;
    MUST(cudaIpcGetMemHandle(&handle, data));
    MUST(cudaEventDestroy(recorded(held)));
    MUST(cudaStreamDestroy(stream()));
    MUST(cudaStreamSynchronize(other));
    set_word(k);
  });
  expect("ended well",
         [] {  // all kernels are loaded
           begin();
           wait_for_word(stream());
           MUST(run(nothing, 1, 1, 0, stream()));
           set_word(0);
         },
         {"CUDA_MODULE_LOADING=EAGER"});
}

}  // namespace

int main() {
  kernels_are_checked();
  launches_have_limits();
  memory_is_checked();
  handles_are_checked();
  waits_use_up_hardware_queues();
  some_calls_wait_for_the_device();
  return sordino::test::report();
}
