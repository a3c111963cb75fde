// NCCL between the GPUs of some ranks. Nothing here waits for a peer, nor for the device: what NCCL has not finished
// with, ready() says, so that the engine's driver can look after everything else meanwhile and notice a dead peer.
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

// What NCCL can fold: no 16-bit integers; averages (kAverage: sums divided by the number of ranks) of floats only.
bool supports(DType type, ReduceOp op);

// Used by one thread at a time. Errors are PeerLost (of nobody in particular: NCCL does not say whom) where NCCL blames
// another process, else DeviceError, UsageError where two ranks have the same GPU. After one, all there is to do is
// abort().
//
// ready() must have been true since the last call before the next one, and before anything else is put on that call's
// stream, an event included: until then what was called may not be on the stream yet. Within a group it is enough that
// it was before begin_group() and is after end_group().
class Communicator {
 public:
  struct Options {
    // Makes this rank's device the calling thread's current one; called on threads of this class's own.
    std::function<void()> use_device;
    // How long the end of a communicator may take: of a healthy one before it is aborted, and of an abort before it is
    // left to itself.
    std::chrono::milliseconds patience{10000};
  };

  // For one communicator: made by one rank, told to all. Throws NotBuilt, as the constructor does, without an NCCL.
  static Bytes new_id();

  // Begins to connect. The calling thread's current device becomes this rank's.
  Communicator(const Bytes& id, int size, int rank) : Communicator(id, size, rank, Options()) {}
  Communicator(const Bytes& id, int size, int rank, Options options);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator() { close(); }

  int size() const { return size_; }
  int rank() const { return rank_; }

  // Whether the latest call has come into effect. Throws what has gone wrong since.
  bool ready();
  // Throws what has gone wrong, to be called while operations run: if a peer dies, they do not end by themselves.
  void check() { static_cast<void>(ready()); }

  // Input and output are the same place or do not overlap, except that a reduce_scatter's output may be this rank's
  // part of the input, and an all_gather's input this rank's part of the output. Counts are of elements, of one rank's
  // part. Nothing happens where they are 0, on whichever rank.
  void all_reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op, Stream stream);
  void reduce(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op, int root,
              Stream stream);
  void reduce_scatter(const std::byte* input, std::byte* output, std::size_t count, DType type, ReduceOp op,
                      Stream stream);
  void broadcast(const std::byte* input, std::byte* output, std::size_t bytes, int root, Stream stream);
  void all_gather(const std::byte* input, std::byte* output, std::size_t bytes, Stream stream);
  void send(const std::byte* input, std::size_t bytes, int to, Stream stream);
  void receive(std::byte* output, std::size_t bytes, int from, Stream stream);

  // What is called in between starts together, so that sends and receives cannot wait for each other in a circle. Both
  // must be called on one thread: NCCL keeps the group there. Rather use Group.
  void begin_group();
  void end_group();

  // Ends all operations, also those on the device that wait for a peer; what they have written is undefined.
  // Idempotent. False if NCCL has not come to an end after Options::patience: then the memory it works on must not be
  // freed.
  bool abort() noexcept;
  // Lets what is on streams end, if all is well, and closes the communicator; what has not ended after
  // Options::patience is aborted. Idempotent, and false as abort(). Destruction does this.
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

// A group that ends on every way out. end() says what failed; without it, failures are left to ready().
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
