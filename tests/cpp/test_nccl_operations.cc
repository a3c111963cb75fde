// Collectives by NCCL on device memory, on the stand-in for NCCL and simulated devices.
#include <cmath>
#include <cstdlib>
#include <memory>

#include "collectives/nccl_operations.h"
#include "device/sim/sim_device.h"
#include "nccl_ranks.h"

using namespace sordino;
using namespace sordino::test;
using nccl::Channel;

namespace {

// Device memory with values in it.
class Memory {
 public:
  Memory(Channel& channel, const Bytes& values) : channel_(channel), bytes(values.size()) {
    data = channel.device().allocate(bytes + 1);
    if (bytes > 0) std::memcpy(data, values.data(), bytes);  // simulated device memory is host memory
  }
  Memory(Channel& channel, std::size_t bytes) : Memory(channel, Bytes(bytes, std::byte{0x5a})) {}
  ~Memory() { channel_.device().free(data); }
  Bytes read() const { return Bytes(data, data + bytes); }

 private:
  Channel& channel_;

 public:
  const std::size_t bytes;
  std::byte* data;
};

// Runs a task to its end, and waits for the work that it has put on the queue.
void finish(Channel& channel, Task task) {
  const auto until = steady_clock::now() + std::chrono::seconds(60);
  while (!task.done()) {
    if (!task.resume()) std::this_thread::yield();
    if (steady_clock::now() > until) throw Error("a task does not end");
  }
  const auto event = channel.device().record(channel.stream());
  while (!event->done()) std::this_thread::yield();
}

void on_channels(int size, const std::function<void(Channel&)>& body) {
  const Bytes id = Communicator::new_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto device = sim::make_device(rank);
        FAKE(fake_nccl_set_device)(device->identity());
        Channel channel(std::make_unique<Communicator>(id, size, rank), device);
        body(channel);
      } catch (const std::exception& error) {
        CHECK(false && "a rank threw", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Bytes slice(const Bytes& data, std::size_t begin, std::size_t end) {
  return Bytes(data.begin() + static_cast<std::ptrdiff_t>(begin), data.begin() + static_cast<std::ptrdiff_t>(end));
}

// Returns whether the result is `post` times the sum of all ranks' values times `pre`: exactly for integers, and within
// a tolerance for floats.
bool is_scaled_sum(DType type, const Bytes& result, int size, double pre, double post) {
  const std::size_t count = result.size() / size_of(type);
  Bytes sum = folded(type, count, size, ReduceOp::kSum);
  kernels::scale(type, sum.data(), count, pre * post);
  if (!is_floating(type)) return sum == result;
  return std::sqrt(kernels::squared_distance(type, sum.data(), result.data(), count) / static_cast<double>(count)) <
         (size_of(type) == 2 ? 2e-2 : 1e-6);
}

void reduce_pieces(Channel& channel, DType type, double pre, double post, bool in_place,
                   std::size_t most = nccl::kMostAtOnce) {
  constexpr std::size_t kCount = 1001, kCuts[] = {0, 1, 300, 777, kCount};
  const int size = channel.communicator().size(), rank = channel.communicator().rank();
  const std::size_t width = size_of(type);
  const Bytes all = values(type, kCount, rank);
  // In one piece, in several, and in one piece on some ranks but several on others.
  for (const int cuts : {1, 4, rank % 2 == 0 ? 1 : 4}) {
    std::vector<std::unique_ptr<Memory>> inputs, outputs;
    Pieces pieces(type);
    for (int cut = 0; cut < cuts; ++cut) {
      const std::size_t begin = cuts == 1 ? 0 : kCuts[cut], end = cuts == 1 ? kCount : kCuts[cut + 1];
      inputs.push_back(std::make_unique<Memory>(channel, slice(all, begin * width, end * width)));
      outputs.push_back(std::make_unique<Memory>(channel, (end - begin) * width));
      pieces.add(inputs.back()->data, in_place ? inputs.back()->data : outputs.back()->data, end - begin);
    }
    finish(channel, nccl::allreduce(channel, pieces, ReduceOp::kSum, pre, post, most));
    Bytes result;
    for (const auto& memory : in_place ? inputs : outputs) {
      const Bytes part = memory->read();
      result.insert(result.end(), part.begin(), part.end());
    }
    if (type == DType::kBool) {
      CHECK(result == folded(type, kCount, size, ReduceOp::kSum));
    } else {
      CHECK(is_scaled_sum(type, result, size, pre, post), name_of(type), size, pre, post, cuts, in_place);
    }
    if (!in_place) CHECK(inputs[0]->read() == slice(all, 0, inputs[0]->bytes));
  }
}

void allreduces(Channel& channel) {
  const double average = 1.0 / channel.communicator().size();
  for (const DType type : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32,
                           DType::kInt64, DType::kUInt8, DType::kBool}) {
    for (const bool in_place : {false, true}) {
      reduce_pieces(channel, type, 1, 1, in_place);
      reduce_pieces(channel, type, 3, 1, in_place);
      reduce_pieces(channel, type, 1, 1, in_place, 1003);  // several calls
      reduce_pieces(channel, type, 1, 3, in_place, 1003);
      if (type != DType::kUInt8) reduce_pieces(channel, type, 2, 0.25, in_place);
      if (is_floating(type) || type == DType::kInt32) reduce_pieces(channel, type, 1, average, in_place);
    }
  }
  finish(channel, nccl::allreduce(channel, Pieces(DType::kFloat32), ReduceOp::kSum, 1, 1));
  Memory values_of(channel, values(DType::kInt32, 100, channel.communicator().rank()));
  Pieces pieces(DType::kInt32);
  pieces.add(values_of.data, values_of.data, 100);
  finish(channel, nccl::allreduce(channel, pieces, ReduceOp::kMax, 1, 1));
  CHECK(values_of.read() == folded(DType::kInt32, 100, channel.communicator().size(), ReduceOp::kMax));
}

// Averages of float16 values whose sum is out of range.
void averages_stay_in_range(Channel& channel) {
  for (const double pre : {1.0, 0.5}) {
    constexpr std::uint16_t kLarge = 0x7800;  // 32768
    Bytes data(20);
    for (std::size_t i = 0; i < 10; ++i) std::memcpy(data.data() + 2 * i, &kLarge, 2);
    Memory memory(channel, data);
    Pieces pieces(DType::kFloat16);
    pieces.add(memory.data, memory.data, 10);
    finish(channel, nccl::allreduce(channel, pieces, ReduceOp::kSum, pre, 1.0 / channel.communicator().size()));
    if (pre == 1) CHECK(memory.read() == data);
    std::uint16_t first;
    std::memcpy(&first, memory.read().data(), 2);
    CHECK(first == (pre == 1 ? 0x7800 : 0x7400));
  }
}

void moves(Channel& channel) {
  const int size = channel.communicator().size(), rank = channel.communicator().rank();
  const auto parts = static_cast<std::size_t>(size), me = static_cast<std::size_t>(rank);
  for (int root = 0; root < size; ++root) {
    const Bytes own = values(DType::kInt64, 50, rank), roots = values(DType::kInt64, 50, root);
    Memory input(channel, own), output(channel, own.size());
    finish(channel, nccl::broadcast(channel, root, input.data, output.data, own.size()));
    CHECK(output.read() == roots && input.read() == own);
    finish(channel, nccl::broadcast(channel, root, input.data, input.data, own.size()));
    CHECK(input.read() == roots);
  }
  for (const bool even : {true, false}) {
    std::vector<std::size_t> sizes;
    Bytes expected;
    for (std::size_t peer = 0; peer < parts; ++peer) {
      sizes.push_back(even ? 60 : 35 * peer);  // the first rank gives nothing
      const Bytes theirs = values(DType::kUInt8, sizes.back(), static_cast<int>(peer));
      expected.insert(expected.end(), theirs.begin(), theirs.end());
    }
    Memory input(channel, values(DType::kUInt8, sizes[me], rank)), output(channel, expected.size());
    finish(channel, nccl::allgather(channel, input.data, sizes, output.data));
    CHECK(output.read() == expected, size, even);
  }
  // The value of each byte shows its sender and its receiver.
  const auto bytes_of = [](std::size_t from, std::size_t to) { return (from * 3 + to * 5) % 7 * 10; };
  const auto mark = [](std::size_t from, std::size_t to) { return static_cast<std::byte>(16 * from + to); };
  std::vector<std::size_t> send_sizes, receive_sizes;
  Bytes sent, expected;
  for (std::size_t peer = 0; peer < parts; ++peer) {
    send_sizes.push_back(bytes_of(me, peer));
    receive_sizes.push_back(bytes_of(peer, me));
    sent.insert(sent.end(), send_sizes.back(), mark(me, peer));
    expected.insert(expected.end(), receive_sizes.back(), mark(peer, me));
  }
  Memory input(channel, sent), output(channel, expected.size());
  finish(channel, nccl::alltoall(channel, input.data, send_sizes, output.data, receive_sizes));
  CHECK(output.read() == expected, size);
}

void reducescatters(Channel& channel) {
  const int size = channel.communicator().size();
  const auto parts = static_cast<std::size_t>(size), me = static_cast<std::size_t>(channel.communicator().rank());
  for (const DType type : {DType::kFloat32, DType::kInt32}) {
    for (const bool even : {true, false}) {
      for (const auto& [pre, post] : {std::pair(1.0, 1.0), std::pair(2.0, 3.0), std::pair(1.0, 1.0 / size)}) {
        std::vector<std::size_t> bounds{0};
        for (std::size_t part = 0; part < parts; ++part) bounds.push_back(bounds.back() + (even ? 40 : 25 * part));
        const std::size_t count = bounds.back(), width = size_of(type);
        Memory input(channel, values(type, count, channel.communicator().rank()));
        Memory output(channel, (bounds[me + 1] - bounds[me]) * width);
        finish(channel, nccl::reducescatter(channel, type, input.data, bounds, output.data, ReduceOp::kSum, pre, post));
        Bytes sum = folded(type, count, size, ReduceOp::kSum);
        kernels::scale(type, sum.data(), count, pre * post);
        const Bytes expected = slice(sum, bounds[me] * width, bounds[me + 1] * width), result = output.read();
        const std::size_t mine = result.size() / width;
        if (type == DType::kInt32) {
          CHECK(result == expected, size, even, pre, post);
        } else {
          CHECK(kernels::squared_distance(type, result.data(), expected.data(), mine) < 1e-9, size, even, pre, post);
        }
      }
    }
  }
}

// Scratch memory grows while the queue still works on the smaller one.
void scratch_grows(Channel& channel) {
  const int size = channel.communicator().size(), rank = channel.communicator().rank();
  std::vector<std::unique_ptr<Memory>> memories;
  std::vector<std::pair<std::size_t, Bytes>> expected;
  for (const std::size_t count : {10, 1000, 100000}) {
    Pieces pieces(DType::kInt32);
    for (int piece = 0; piece < 2; ++piece) {
      memories.push_back(std::make_unique<Memory>(channel, values(DType::kInt32, count, rank)));
      pieces.add(memories.back()->data, memories.back()->data, count);
    }
    Task task = nccl::allreduce(channel, pieces, ReduceOp::kSum, 1, 1);
    while (!task.done()) {
      if (!task.resume()) std::this_thread::yield();
    }
  }
  const auto event = channel.device().record(channel.stream());
  while (!event->done()) std::this_thread::yield();
  for (const auto& memory : memories) {
    CHECK(memory->read() == folded(DType::kInt32, memory->bytes / 4, size, ReduceOp::kSum));
  }
}

void a_task_throws_what_has_failed() {
  on_channels(2, [](Channel& channel) {
    await(channel.communicator());
    if (channel.communicator().rank() == 1) return;
    FAKE(fake_nccl_break)(0, nccl::kRemoteError);
    Memory memory(channel, Bytes(4));
    CHECK_THROWS(PeerLost, finish(channel, nccl::broadcast(channel, 0, memory.data, memory.data, 4)));
  });
}

}  // namespace

int main() {
  setenv("SORDINO_NCCL", FAKE_NCCL, 1);
  FAKE(fake_nccl_set_enqueue)([](void* stream, void (*work)(void*), void* argument) {
    sim::enqueue(reinterpret_cast<Stream>(stream), [=] { work(argument); });
  });
  for (const int size : {1, 2, 3, 5}) {
    on_channels(size, allreduces);
    on_channels(size, averages_stay_in_range);
    on_channels(size, moves);
    on_channels(size, reducescatters);
    on_channels(size, scratch_grows);
  }
  a_task_throws_what_has_failed();
  CHECK(FAKE(fake_nccl_live)() == 0);
  return sordino::test::report();
}
