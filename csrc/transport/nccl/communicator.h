// Communicator of NCCL between the GPUs of some ranks. Only close() and abort() wait for a peer or for the device.
// ready() returns whether NCCL has finished, so that the polling thread can do other work meanwhile, and can notice a
// dead peer.
#pragma once

#include <chrono>
#include <functional>
#include <utility>

#include "base/awake_clock.h"
#include "base/dtype.h"
#include "base/wire.h"
#include "device/device.h"
#include "transport/nccl/api.h"

namespace sordino::nccl {

// True if NCCL can reduce this type with this operation. It has no 16-bit integers, no Adasum, and averages (kAverage:
// the sum divided by the number of ranks) of floats only.
bool supports(DType type, ReduceOp op);

// Used by one thread at a time. Errors: PeerLost if NCCL blames another process (without ranks: NCCL does not say
// which), UsageError if two ranks have the same GPU, otherwise DeviceError. After an error, only abort() may be called.
//
// After each call, ready() must have returned true before the next call, and before anything else (such as an event) is
// put on the stream: until then, the call may not be on its stream yet. A group counts as one call: ready() must be
// true before begin_group() and after end_group().
class Communicator {
 public:
  struct Options {
    // Makes this rank's device the current one of the calling thread. Called on threads that this class starts.
    std::function<void()> use_device;
    // Time limit of close() for work on streams, after which the communicator is aborted. Also the time limit of an
    // abort, after which its thread is left behind.
    std::chrono::milliseconds patience{10000};
  };

  // Id of one communicator: made by one rank, and sent to all. Throws NotBuilt without NCCL, as does the constructor.
  static Bytes new_id();

  // Begins to connect. The current device of the calling thread becomes this rank's.
  Communicator(const Bytes& id, int size, int rank) : Communicator(id, size, rank, Options()) {}
  Communicator(const Bytes& id, int size, int rank, Options options);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() { close(); }

  int size() const { return size_; }
  int rank() const { return rank_; }

  // True once the latest call has taken effect. Throws errors that have occurred since.
  bool ready();
  // Throws errors. Call this while operations run, because they do not end by themselves if a peer dies.
  void check() { static_cast<void>(ready()); }

  // Input and output must be equal or not overlap, with two exceptions: the output of reduce_scatter may be this rank's
  // part of the input, and the input of all_gather this rank's part of the output. Counts are elements of one rank's
  // part. If the count is 0, nothing happens, on any rank.
  void all_reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op, Stream stream);
  void reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op, int root,
              Stream stream);
  void reduce_scatter(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op,
                      Stream stream);
  void broadcast(const std::byte* input, std::byte* output, std::size_t bytes, int root, Stream stream);
  void all_gather(const std::byte* input, std::byte* output, std::size_t bytes, Stream stream);
  void send(const std::byte* input, std::size_t bytes, int to, Stream stream);
  void receive(std::byte* output, std::size_t bytes, int from, Stream stream);

  // Calls in between start together, so that sends and receives cannot wait for each other in a circle. Call both on
  // one thread, because NCCL keeps a group for each thread. Prefer Group.
  void begin_group();
  void end_group();

  // Ends all operations, also those on the device that wait for a peer; their output is undefined. Idempotent. False if
  // NCCL has not ended after Options::patience: then the memory that it works on must not be freed.
  bool abort() noexcept;
  // Lets work on streams end if there was no error, and closes the communicator. Aborts work that has not ended after
  // Options::patience. Idempotent. Returns false in the same case as abort(). The destructor calls it.
  bool close() noexcept;

 private:
  void require(Result result, const char* function);
  Comm* open() const;
  bool settled(Deadline& limit);
  bool finish();
  bool end(Result (*function)(Comm*)) noexcept;

  const Api& api_;
  const int size_, rank_;
  const Options options_;
  Comm* comm_ = nullptr;
  bool connected_ = false, failed_ = false, ended_ = true;
};

// Group that ends on every path. end() throws its errors; without end(), they are left to ready().
class Group {
 public:
  explicit Group(Communicator& communicator) : communicator_(&communicator) { communicator.begin_group(); }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  void end() { std::exchange(communicator_, nullptr)->end_group(); }
  ~Group();

 private:
  Communicator* communicator_;
};

}  // namespace sordino::nccl
