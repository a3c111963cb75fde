// Streams and events.
//
// A device has CUDA_DEVICE_MAX_CONNECTIONS hardware queues. A new stream gets the next one in turn. So if there are
// more streams than queues, work that waits holds up other streams, as measured on an H100: with 8 streams in
// cuStreamWaitValue64, a write on a ninth one does not come through.
#pragma once

#include <cuda_runtime.h>

#include <functional>

#include "hardware_queue.h"

namespace on_cpu {

// The GPU of the context that the calling thread has pushed. A call without one is a fault: the runtime would take GPU
// 0 then, and the library never relies on that.
int current_device(const char* call);
int device_count();

// Puts work on a stream. A fault if the stream is destroyed, captured, or of a device that is not the current one.
void put(cudaStream_t stream, std::function<void()> work, const char* call);
void put(cudaStream_t stream, int device, std::function<void()> work, const char* call);  // of this device
// Waits for all work that is on the device's streams by now.
void drain(int device);

// Returns the error of a call that a capture forbids in this thread, and ends the capture. Guide, "prohibited and
// unhandled operations"; cudaThreadExchangeStreamCaptureMode.
bool refused_by_capture();

// Notes an error for cudaGetLastError.
cudaError_t failed(cudaError_t code);

}  // namespace on_cpu

struct CUctx_st {
  int device;
};
