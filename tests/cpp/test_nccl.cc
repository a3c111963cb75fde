// NCCL's communicators, on the stand-in for NCCL (fake_nccl.cc), with threads as ranks and as their streams.
#include <cstdlib>

#include "nccl_ranks.h"
#include "transport/nccl/loader.h"

using namespace sordino;
using namespace sordino::test;

namespace {

std::span<const std::byte> cut(const Bytes& data, std::size_t part, std::size_t bytes) {
  return std::span(data).subspan(part * bytes, bytes);
}
bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

void the_library_is_found_or_missed() {
  CHECK_THROWS(NotBuilt, (setenv("SORDINO_NCCL", "off", 1), nccl::api()));
  CHECK_THROWS(NotBuilt, Communicator::new_id());
  CHECK_THROWS(NotBuilt, Communicator(Bytes(128), 1, 0));
  try {
    setenv("SORDINO_NCCL", "/nowhere/libnccl.so.2", 1);
    nccl::describe();
    CHECK(false && "found what is not there");
  } catch (const NotBuilt& error) {
    CHECK(std::string(error.what()).find("/nowhere/libnccl.so.2") != std::string::npos);
  }
  CHECK_THROWS(NotBuilt, (setenv("SORDINO_NCCL", "libc.so.6", 1), nccl::api()));  // another library
  unsetenv("SORDINO_NCCL");
  nccl::hint(FAKE_NCCL);
  CHECK(nccl::describe() == "NCCL 2.30.7, libfake_nccl.so", nccl::describe());
}

void nccl_can_do_what_it_can() {
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto type = static_cast<DType>(code);
    const bool short_integer = type == DType::kInt16 || type == DType::kUInt16;
    CHECK(nccl::supports(type, ReduceOp::kSum) == !short_integer);
    CHECK(nccl::supports(type, ReduceOp::kMin) == !short_integer);
    CHECK(nccl::supports(type, ReduceOp::kAverage) == is_floating(type));
    CHECK(!nccl::supports(type, ReduceOp::kAdasum));
  }
}

void reductions(Communicator& communicator, Queue& queue) {
  constexpr std::size_t kCount = 1000;
  const int size = communicator.size(), rank = communicator.rank();
  const auto parts = static_cast<std::size_t>(size);
  for (int code = 0; code < kDTypeCount; ++code) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kAverage}) {
      const auto type = static_cast<DType>(code);
      Bytes input = values(type, kCount * parts, rank), output(input.size());
      if (!nccl::supports(type, op)) {
        CHECK_THROWS(UsageError, communicator.all_reduce(input.data(), output.data(), 1, type, op, queue.stream()));
        continue;
      }
      const Bytes expected = folded(type, kCount * parts, size, op);
      const std::size_t bytes = kCount * size_of(type);
      communicator.all_reduce(input.data(), output.data(), kCount * parts, type, op, queue.stream());
      CHECK(!communicator.ready());
      await(communicator);
      CHECK(queue.drained() && equal(output, expected), name_of(type), static_cast<int>(op), size);

      Bytes part(bytes);
      communicator.reduce_scatter(input.data(), part.data(), kCount, type, op, queue.stream());
      await(communicator);
      CHECK(queue.drained() && equal(part, cut(expected, static_cast<std::size_t>(rank), bytes)), name_of(type));

      Bytes rooted(input.size());
      communicator.reduce(input.data(), rooted.data(), kCount * parts, type, op, size - 1, queue.stream());
      await(communicator);
      CHECK(queue.drained() && equal(rooted, rank == size - 1 ? expected : Bytes(input.size())), name_of(type));

      communicator.all_reduce(input.data(), input.data(), kCount * parts, type, op, queue.stream());
      await(communicator);
      CHECK(queue.drained() && equal(input, expected), name_of(type));
    }
  }
}

void moves(Communicator& communicator, Queue& queue) {
  constexpr std::size_t kBytes = 777;
  const int size = communicator.size(), rank = communicator.rank();
  const Bytes mine = values(DType::kUInt8, kBytes, rank);
  for (int root = 0; root < size; ++root) {
    Bytes output(kBytes);
    communicator.broadcast(mine.data(), output.data(), kBytes, root, queue.stream());
    await(communicator);
    CHECK(queue.drained() && equal(output, values(DType::kUInt8, kBytes, root)));
  }
  Bytes all(kBytes * static_cast<std::size_t>(size));
  communicator.all_gather(mine.data(), all.data(), kBytes, queue.stream());
  await(communicator);
  CHECK(queue.drained());
  for (int peer = 0; peer < size; ++peer) {
    CHECK(equal(cut(all, static_cast<std::size_t>(peer), kBytes), values(DType::kUInt8, kBytes, peer)));
  }
  // Round a ring; a single rank sends to itself.
  Bytes from_left(kBytes);
  const int right = (rank + 1) % size, left = (rank + size - 1) % size;
  communicator.begin_group();
  communicator.send(mine.data(), kBytes, right, queue.stream());
  communicator.receive(from_left.data(), kBytes, left, queue.stream());
  communicator.end_group();
  await(communicator);
  CHECK(queue.drained() && equal(from_left, values(DType::kUInt8, kBytes, left)));
  // Several transfers between two ranks keep their order, and collectives may be among them.
  Bytes first(10), second(20), sum(4);
  const Bytes ones = values(DType::kInt32, 1, rank);
  nccl::Group group(communicator);
  communicator.receive(first.data(), 10, left, queue.stream());
  communicator.send(mine.data() + 1, 10, right, queue.stream());
  communicator.all_reduce(ones.data(), sum.data(), 1, DType::kInt32, ReduceOp::kSum, queue.stream());
  communicator.send(mine.data() + 2, 20, right, queue.stream());
  communicator.receive(second.data(), 20, left, queue.stream());
  group.end();
  await(communicator);
  const Bytes theirs = values(DType::kUInt8, kBytes, left);
  CHECK(queue.drained() && equal(first, std::span(theirs).subspan(1, 10)));
  CHECK(equal(second, std::span(theirs).subspan(2, 20)) && equal(sum, folded(DType::kInt32, 1, size, ReduceOp::kSum)));
  // Empty operations do not reach NCCL.
  communicator.all_reduce(nullptr, nullptr, 0, DType::kFloat32, ReduceOp::kSum, queue.stream());
  communicator.send(nullptr, 0, 0, queue.stream());
  CHECK(communicator.ready());
}

// A group that is left by an exception is closed: the next calls are not part of it.
void a_group_ends_with_its_scope() {
  on_ranks(2, [](Communicator& communicator, Queue& queue) {
    Bytes value = values(DType::kInt32, 1, communicator.rank());
    try {
      nccl::Group group(communicator);
      communicator.all_reduce(value.data(), value.data(), 1, DType::kInt16, ReduceOp::kSum, queue.stream());
    } catch (const UsageError&) {
    }
    communicator.all_reduce(value.data(), value.data(), 1, DType::kInt32, ReduceOp::kSum, queue.stream());
    await(communicator);
    CHECK(queue.drained() && equal(value, folded(DType::kInt32, 1, 2, ReduceOp::kSum)));
  });
}

// A call before the communicator is ready is refused, and the communicator fails.
void a_call_too_early_is_an_error() {
  on_ranks(1, [](Communicator& communicator, Queue& queue) {
    Bytes value = values(DType::kInt32, 1, 0);
    const auto call = [&] {
      communicator.all_reduce(value.data(), value.data(), 1, DType::kInt32, ReduceOp::kSum, queue.stream());
    };
    call();
    CHECK_THROWS(DeviceError, call());
  });
}

void ranks_that_disagree_fail() {
  on_ranks(2, [](Communicator& communicator, Queue& queue) {
    Bytes value(8);
    const std::size_t count = communicator.rank() == 0 ? 1 : 2;
    communicator.all_reduce(value.data(), value.data(), count, DType::kFloat32, ReduceOp::kSum, queue.stream());
    try {
      const auto until = steady_clock::now() + std::chrono::seconds(20);
      while (steady_clock::now() < until) communicator.check();
      CHECK(false && "nothing was thrown");
    } catch (const DeviceError& error) {
      CHECK(std::string(error.what()).find("AllReduce(count 2") != std::string::npos, error.what());
    }
    CHECK(communicator.abort() && queue.drained());
  });
}

// Rank 1 never comes: rank 0's operation ends only because `end` aborts it.
void alone_in_an_operation(const std::function<void(std::unique_ptr<Communicator>&)>& end, milliseconds patience) {
  const Bytes id = Communicator::new_id();
  Communicator::Options options;
  options.patience = patience;
  std::unique_ptr<Communicator> ranks[2];
  for (int rank = 0; rank < 2; ++rank) ranks[rank] = std::make_unique<Communicator>(id, 2, rank, options);
  for (auto& rank : ranks) await(*rank);
  Queue queue;
  Bytes value(4);
  ranks[0]->all_reduce(value.data(), value.data(), 1, DType::kFloat32, ReduceOp::kSum, queue.stream());
  await(*ranks[0]);
  CHECK(!queue.drained(milliseconds(30)));
  end(ranks[0]);
  CHECK(queue.drained());
}

void failures_have_types_and_abort_ends_them() {
  const auto broken = [](int result, auto check) {
    alone_in_an_operation(
        [&](auto& communicator) {
          FAKE(fake_nccl_break)(0, result);
          check(*communicator);
          CHECK(communicator->abort() && communicator->abort());
          CHECK_THROWS(DeviceError, communicator->ready());
          CHECK_THROWS(DeviceError, communicator->begin_group());
        },
        milliseconds(10000));
  };
  broken(nccl::kUnhandledCudaError, [](Communicator& communicator) {
    try {
      communicator.check();
      CHECK(false && "nothing was thrown");
    } catch (const DeviceError& error) {
      const std::string text = error.what();
      CHECK(text.find("unhandled cuda error (broken by the test)") != std::string::npos, text);
    }
  });
  broken(nccl::kRemoteError, [](Communicator& communicator) {
    try {
      communicator.check();
      CHECK(false && "nothing was thrown");
    } catch (const PeerLost& error) {
      CHECK(error.ranks.empty());
    }
  });
}

void nothing_hangs_at_the_end() {
  // The operation never ends, so closing the communicator aborts it after a while.
  alone_in_an_operation([](auto& communicator) { communicator = nullptr; }, milliseconds(50));
  // Here aborting does not end either.
  FAKE(fake_nccl_hang_aborts)(1);
  alone_in_an_operation([](auto& communicator) { CHECK(!communicator->abort() && !communicator->abort()); },
                        milliseconds(50));
  FAKE(fake_nccl_hang_aborts)(0);
  // A communicator that never connected is not waited for.
  const auto start = steady_clock::now();
  {
    Communicator never(Communicator::new_id(), 2, 0);
    for (int i = 0; i < 100; ++i) CHECK(!never.ready());
  }
  CHECK(steady_clock::now() - start < std::chrono::seconds(5));
  // Its own threads set the device.
  std::atomic<int> calls{0};
  Communicator::Options options;
  options.use_device = [&] { ++calls; };
  on_ranks(2, [](Communicator&, Queue&) {}, options);
  CHECK(calls == 2);
}

void what_cannot_be_is_refused() {
  CHECK_THROWS(UsageError, Communicator(Bytes(127), 1, 0));
  CHECK_THROWS(DeviceError, Communicator(Bytes(128), 1, 0));
  const Bytes id = Communicator::new_id();
  CHECK_THROWS(DeviceError, Communicator(id, 2, 2));
  {
    Communicator first(id, 2, 0);
    CHECK_THROWS(UsageError, Communicator(id, 2, 0));
    CHECK_THROWS(UsageError, first.ready());
  }
  const Bytes other = Communicator::new_id();
  FAKE(fake_nccl_set_device)(7);
  Communicator first(other, 2, 0);
  try {
    Communicator second(other, 2, 1);
    CHECK(false && "two ranks have one GPU");
  } catch (const UsageError& error) {
    CHECK(std::string(error.what()).find("Duplicate GPU") != std::string::npos, error.what());
  }
  CHECK_THROWS(UsageError, first.ready());
  FAKE(fake_nccl_set_device)(0);
}

}  // namespace

int main() {
  the_library_is_found_or_missed();
  nccl_can_do_what_it_can();
  for (const int size : {1, 2, 3, 5}) {
    on_ranks(size, reductions);
    on_ranks(size, moves);
  }
  CHECK(FAKE(fake_nccl_aborts)() == 0);  // healthy communicators are closed
  a_group_ends_with_its_scope();
  a_call_too_early_is_an_error();
  ranks_that_disagree_fail();
  failures_have_types_and_abort_ends_them();
  nothing_hangs_at_the_end();
  what_cannot_be_is_refused();
  CHECK(FAKE(fake_nccl_live)() == 0);
  return sordino::test::report();
}
