#include "transport/nccl/communicator.h"

#include <cstring>
#include <future>
#include <thread>

#include "transport/nccl/loader.h"

namespace sordino::nccl {
namespace {

constexpr Type kNoType = -1;

Type type_of(DType type) {
  switch (type) {
    case DType::kBool:
    case DType::kUInt8: return kTypeUInt8;
    case DType::kInt8: return kTypeInt8;
    case DType::kUInt16:
    case DType::kInt16: return kNoType;
    case DType::kUInt32: return kTypeUInt32;
    case DType::kInt32: return kTypeInt32;
    case DType::kUInt64: return kTypeUInt64;
    case DType::kInt64: return kTypeInt64;
    case DType::kFloat16: return kTypeFloat16;
    case DType::kBFloat16: return kTypeBFloat16;
    case DType::kFloat32: return kTypeFloat32;
    case DType::kFloat64: return kTypeFloat64;
  }
  return kNoType;
}

// Bools are bytes of 0 and 1: the maximum is OR, the minimum AND (kernels/kernels.h).
Op op_of(DType type, ReduceOp op) {
  const bool logical = type == DType::kBool;
  switch (op) {
    case ReduceOp::kAverage: return kOpAverage;
    case ReduceOp::kSum: return logical ? kOpMax : kOpSum;
    case ReduceOp::kProduct: return logical ? kOpMin : kOpProduct;
    case ReduceOp::kMin: return kOpMin;
    case ReduceOp::kMax: return kOpMax;
    case ReduceOp::kAdasum: break;
  }
  return kOpSum;
}

void require_support(DType type, ReduceOp op) {
  if (supports(type, op)) return;
  throw UsageError("NCCL has no reduction " + std::to_string(static_cast<int>(op)) + " of " +
                   std::string(name_of(type)));
}

std::string describe(const Api& api, const char* function, Result result, Comm* comm) {
  std::string text = std::string(function) + ": " + api.error_string(result);
  const char* last = api.last_error(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

void* pointer(Stream stream) { return reinterpret_cast<void*>(stream); }

}  // namespace

bool supports(DType type, ReduceOp op) {
  if (type_of(type) == kNoType || op == ReduceOp::kAdasum) return false;
  return op != ReduceOp::kAverage || is_floating(type);
}

Bytes Communicator::new_id() {
  const Api& api = nccl::api();
  UniqueId id;
  if (const Result result = api.get_unique_id(&id); result != kSuccess) {
    throw DeviceError("NCCL failed: " + describe(api, "ncclGetUniqueId", result, nullptr));
  }
  Bytes bytes(sizeof id);
  std::memcpy(bytes.data(), &id, sizeof id);
  return bytes;
}

Communicator::Communicator(const Bytes& id, int size, int rank, Options options)
    : api_(nccl::api()), size_(size), rank_(rank), options_(std::move(options)) {
  UniqueId unique;
  if (id.size() != sizeof unique) throw UsageError("NCCL's ids have 128 bytes, not " + std::to_string(id.size()));
  std::memcpy(&unique, id.data(), sizeof unique);
  Settings settings;
  settings.blocking = 0;
  try {
    require(api_.init_rank(&comm_, size, unique, rank, &settings), "ncclCommInitRankConfig");
  } catch (...) {
    abort();
    throw;
  }
}

void Communicator::require(Result result, const char* function) {
  if (result == kSuccess || result == kInProgress) return;
  failed_ = true;
  const std::string text = "NCCL failed on rank " + std::to_string(rank_) + " of " + std::to_string(size_) + ", in " +
                           describe(api_, function, result, comm_);
  if (result == kRemoteError)
    throw PeerLost(text + ". A peer or the network to it has failed; NCCL does not report which.", {});
  if (result == kInvalidUsage && !connected_) throw UsageError(text + ". Do two ranks use the same GPU?");
  throw DeviceError(text);
}

Comm* Communicator::open() const {
  if (comm_ == nullptr) throw DeviceError("NCCL's communicator of rank " + std::to_string(rank_) + " was aborted");
  return comm_;
}

bool Communicator::ready() {
  Result state = kSuccess;
  require(api_.async_error(open(), &state), "ncclCommGetAsyncError");
  require(state, "an earlier call");
  if (state == kInProgress) return false;
  connected_ = true;
  return true;
}

void Communicator::all_reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op,
                              Stream stream) {
  require_support(type, op);
  if (count == 0) return;
  require(api_.all_reduce(input, output, count, type_of(type), op_of(type, op), open(), pointer(stream)),
          "ncclAllReduce");
}

void Communicator::reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op,
                          int root, Stream stream) {
  require_support(type, op);
  if (count == 0) return;
  require(api_.reduce(input, output, count, type_of(type), op_of(type, op), root, open(), pointer(stream)),
          "ncclReduce");
}

void Communicator::reduce_scatter(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op,
                                  Stream stream) {
  require_support(type, op);
  if (count == 0) return;
  require(api_.reduce_scatter(input, output, count, type_of(type), op_of(type, op), open(), pointer(stream)),
          "ncclReduceScatter");
}

void Communicator::broadcast(const std::byte* input, std::byte* output, std::size_t bytes, int root, Stream stream) {
  if (bytes == 0) return;
  require(api_.broadcast(input, output, bytes, kTypeUInt8, root, open(), pointer(stream)), "ncclBroadcast");
}

void Communicator::all_gather(const std::byte* input, std::byte* output, std::size_t bytes, Stream stream) {
  if (bytes == 0) return;
  require(api_.all_gather(input, output, bytes, kTypeUInt8, open(), pointer(stream)), "ncclAllGather");
}

void Communicator::send(const std::byte* input, std::size_t bytes, int to, Stream stream) {
  if (bytes == 0) return;
  require(api_.send(input, bytes, kTypeUInt8, to, open(), pointer(stream)), "ncclSend");
}

void Communicator::receive(std::byte* output, std::size_t bytes, int from, Stream stream) {
  if (bytes == 0) return;
  require(api_.receive(output, bytes, kTypeUInt8, from, open(), pointer(stream)), "ncclRecv");
}

void Communicator::begin_group() {
  open();
  require(api_.group_start(), "ncclGroupStart");
}

void Communicator::end_group() { require(api_.group_end(), "ncclGroupEnd"); }

bool Communicator::settled(Deadline& limit) {
  while (!ready()) {
    if (limit.passed()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// Does not wait for a communicator that never connected: usually a peer of it will never come.
bool Communicator::finish() {
  if (failed_ || !connected_) return false;
  Deadline limit(options_.patience);
  if (!settled(limit)) return false;
  require(api_.finalize(comm_), "ncclCommFinalize");
  return settled(limit);
}

bool Communicator::close() noexcept {
  if (comm_ == nullptr) return ended_;
  bool finished = false;
  try {
    finished = finish();
  } catch (const std::exception&) {
    // A noexcept function cannot report it.
  }
  return end(finished ? api_.destroy : api_.abort);
}

bool Communicator::abort() noexcept { return comm_ == nullptr ? ended_ : end(api_.abort); }

// These calls block, also on a non-blocking communicator, and have been seen to block forever. So they run on their own
// thread, which is left behind if it does not return.
bool Communicator::end(Result (*function)(Comm*)) noexcept {
  Comm* comm = std::exchange(comm_, nullptr);
  try {
    auto over = std::make_shared<std::promise<void>>();
    std::future<void> waiting = over->get_future();
    std::thread([over, comm, function, use_device = options_.use_device] {
      try {
        if (use_device) use_device();
      } catch (...) {
        // The device is lost, but NCCL still has to release host memory and threads.
      }
      function(comm);
      over->set_value();
    }).detach();
    ended_ = waiting.wait_for(options_.patience) == std::future_status::ready;
  } catch (...) {
    ended_ = false;  // no thread or no memory: the communicator leaks
  }
  return ended_;
}

Group::~Group() {
  if (communicator_ == nullptr) return;
  try {
    communicator_->end_group();
  } catch (const Error&) {
    // An exception in flight has the better message.
  }
}

}  // namespace sordino::nccl
