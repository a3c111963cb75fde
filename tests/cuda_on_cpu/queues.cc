#include "queues.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control.h"
#include "memory.h"

struct CUstream_st {
  on_cpu::HardwareQueue* queue;
  int device;
  bool blocking;  // ordered with the legacy stream
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::shared_ptr<on_cpu::Marker> latest;
};
struct CUevent_st {
  int device;
  std::shared_ptr<on_cpu::Marker> marker;  // of the latest record
};

namespace on_cpu {
namespace {

struct Streams {
  std::mutex mutex;
  std::vector<std::vector<HardwareQueue*>> queues;  // by device
  std::vector<std::size_t> made;                    // by device
  std::map<int, CUstream_st*> legacy;
  std::set<cudaStream_t> all;
  std::set<cudaEvent_t> events;
  std::vector<cudaStream_t> destroyed;  // never used again, so every later use is found
  std::vector<cudaEvent_t> destroyed_events;
  int captures = 0;  // streams that are captured in global mode
};
Streams& streams() {
  static auto* all = new Streams;  // threads of queues use it until the process ends
  return *all;
}

thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

std::size_t connections() {
  static const std::size_t wanted = std::clamp<std::size_t>(setting("CUDA_DEVICE_MAX_CONNECTIONS", 8), 1, 32);
  return wanted;
}

HardwareQueue*& queue_of(int device, std::size_t number) {
  auto& queues = streams().queues;
  queues.resize(std::max(queues.size(), static_cast<std::size_t>(device) + 1));
  auto& own = queues[static_cast<std::size_t>(device)];
  own.resize(connections() + 1);  // the last one is the legacy stream's
  HardwareQueue*& queue = own[number];
  if (queue == nullptr) queue = new HardwareQueue(static_cast<unsigned>(number));
  return queue;
}

// The stream behind a handle. Call it with the mutex.
CUstream_st& stream_of(cudaStream_t stream, int device, const char* call) {
  if (stream == nullptr) {
    CUstream_st*& legacy = streams().legacy[device];
    if (legacy == nullptr) legacy = new CUstream_st{queue_of(device, connections()), device, false, {}, {}, {}};
    return *legacy;
  }
  if (streams().all.count(stream) == 0) fault(std::string(call) + " on a stream that has been destroyed");
  if (stream->device != device) fault(std::string(call) + " on a stream of another device than the current one");
  return *stream;
}

CUevent_st& event_of(cudaEvent_t event, const char* call) {
  if (streams().events.count(event) == 0) fault(std::string(call) + " with an event that has been destroyed");
  return *event;
}

void put_locked(CUstream_st& stream, bool legacy, std::function<void()> work) {
  // API reference, "stream synchronization behavior": the legacy stream and blocking streams wait for each other.
  std::vector<std::shared_ptr<Marker>> before;
  if (legacy) {
    for (CUstream_st* other : streams().all) {
      if (other->blocking && other->device == stream.device && other->latest) before.push_back(other->latest);
    }
  } else if (const auto found = streams().legacy.find(stream.device);
             stream.blocking && found != streams().legacy.end() && found->second->latest) {
    before.push_back(found->second->latest);
  }
  std::shared_ptr<Marker> end;
  if (legacy || stream.blocking) end = stream.latest = std::make_shared<Marker>();
  stream.queue->put([before = std::move(before), work = std::move(work), end] {
    for (const auto& marker : before) marker->wait();
    work();
    if (end) end->reach();
  });
}

}  // namespace

int device_count() { return static_cast<int>(setting("CUDA_ON_CPU_DEVICES", 2)); }

void put(cudaStream_t stream, std::function<void()> work, const char* call) {
  put(stream, current_device(call), std::move(work), call);
}

void put(cudaStream_t stream, int device, std::function<void()> work, const char* call) {
  if (stream == nullptr && pretends()) return work();
  std::lock_guard lock(streams().mutex);
  CUstream_st& found = stream_of(stream, device, call);
  if (found.capture != cudaStreamCaptureStatusNone) fault(std::string(call) + " on a stream that is captured");
  put_locked(found, stream == nullptr, std::move(work));
}

void drain(int device) {
  std::vector<std::shared_ptr<Marker>> ends;
  {
    std::lock_guard lock(streams().mutex);
    auto& queues = streams().queues;
    if (queues.size() <= static_cast<std::size_t>(device)) return;
    for (HardwareQueue* queue : queues[static_cast<std::size_t>(device)]) {
      if (queue == nullptr) continue;
      ends.push_back(std::make_shared<Marker>());
      queue->put([end = ends.back()] { end->reach(); });
    }
  }
  for (const auto& end : ends) end->wait();
}

bool refused_by_capture() {
  std::lock_guard lock(streams().mutex);
  if (streams().captures == 0 || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  for (cudaStream_t stream : streams().all) {
    if (stream->capture == cudaStreamCaptureStatusActive) stream->capture = cudaStreamCaptureStatusInvalidated;
  }
  return true;
}

}  // namespace on_cpu

using namespace on_cpu;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  called(__func__);
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  called(__func__);
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  called(__func__);
  const int device = current_device(__func__);
  std::lock_guard lock(streams().mutex);
  auto& made = streams().made;
  made.resize(std::max(made.size(), static_cast<std::size_t>(device) + 1));
  const std::size_t number = made[static_cast<std::size_t>(device)]++ % connections();
  *stream = new CUstream_st{queue_of(device, number), device, (flags & cudaStreamNonBlocking) == 0, {}, {}, {}};
  streams().all.insert(*stream);
  return cudaSuccess;
}

// Work that is on the stream still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  called(__func__);
  std::lock_guard lock(streams().mutex);
  stream_of(stream, current_device(__func__), __func__);
  streams().all.erase(stream);
  streams().destroyed.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  const auto end = std::make_shared<Marker>();
  put(stream, [end] { end->reach(); }, __func__);
  end->wait();
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  called(__func__);
  std::shared_ptr<Marker> marker;
  {
    std::lock_guard lock(streams().mutex);
    marker = event_of(event, __func__).marker;
  }
  // CUDA does nothing then. No caller means that.
  if (!marker) fault("cudaStreamWaitEvent with an event that was never recorded");
  put(stream, [marker] { marker->wait(); }, __func__);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  called(__func__);
  const int device = current_device(__func__);
  std::lock_guard lock(streams().mutex);
  // API reference: for the legacy stream, while a blocking stream of the same context is captured.
  for (cudaStream_t other : streams().all) {
    const bool implicit = other->blocking && other->capture != cudaStreamCaptureStatusNone;
    if (stream == nullptr && implicit) return failed(cudaErrorStreamCaptureImplicit);
  }
  *status = stream_of(stream, device, __func__).capture;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  std::lock_guard lock(streams().mutex);
  CUstream_st& found = stream_of(stream, current_device(__func__), __func__);
  found.capture = cudaStreamCaptureStatusActive;
  found.mode = mode;
  streams().captures += mode == cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t*) {
  std::lock_guard lock(streams().mutex);
  CUstream_st& found = stream_of(stream, current_device(__func__), __func__);
  streams().captures -= found.mode == cudaStreamCaptureModeGlobal;
  const bool whole = std::exchange(found.capture, cudaStreamCaptureStatusNone) == cudaStreamCaptureStatusActive;
  return whole ? cudaSuccess : failed(cudaErrorStreamCaptureInvalidated);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  called(__func__);
  const int device = current_device(__func__);
  std::lock_guard lock(streams().mutex);
  *event = new CUevent_st{device, nullptr};
  streams().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  called(__func__);
  current_device(__func__);
  std::lock_guard lock(streams().mutex);
  event_of(event, __func__);
  streams().events.erase(event);
  streams().destroyed_events.push_back(event);
  event->marker = nullptr;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  called(__func__);
  const auto marker = std::make_shared<Marker>();
  {
    std::lock_guard lock(streams().mutex);
    // API reference: the event and the stream must be of the same context.
    if (event_of(event, __func__).device != current_device(__func__)) return failed(cudaErrorInvalidResourceHandle);
    event->marker = marker;
  }
  put(stream, [marker] { marker->reach(); }, __func__);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  called(__func__);
  current_device(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  std::lock_guard lock(streams().mutex);
  const auto& marker = event_of(event, __func__).marker;
  if (!marker) fault("cudaEventQuery of an event that was never recorded");
  return marker->reached() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize() {
  called(__func__);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  drain(current_device(__func__));
  return cudaSuccess;
}

}  // extern "C"

void cuda_on_cpu_enqueue(void* stream, void (*work)(void*), void* argument) {
  const auto at = static_cast<cudaStream_t>(stream);
  // NCCL has devices of its own, whatever the current one is.
  put(
      at, at != nullptr ? at->device : 0,
      [=] {
        const Shown shown(Shown::kAll);
        work(argument);
      },
      "NCCL");
}
