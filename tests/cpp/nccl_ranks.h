// Ranks as threads, each with threads as streams, on the stand-in for NCCL. Include this in one source file of a test
// only: it defines the function that the stand-in looks for.
#pragma once

#include <dlfcn.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "check.h"
#include "fake_nccl.h"
#include "kernels/kernels.h"
#include "transport/nccl/communicator.h"

namespace sordino::test {

using nccl::Communicator;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    put({});
    thread_.join();
  }
  Stream stream() { return reinterpret_cast<Stream>(this); }
  void put(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  // Returns whether all work on the stream ended within the limit.
  bool drained(milliseconds limit = milliseconds(20000)) {
    auto over = std::make_shared<std::atomic<bool>>(false);
    put([over] { *over = true; });
    const auto until = steady_clock::now() + limit;
    while (!*over && steady_clock::now() < until) std::this_thread::yield();
    return *over;
  }

 private:
  void run() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (!work) return;
      work();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  std::thread thread_;
};

template <class Function>
Function* fake(const char* name) {
  static void* const library = dlopen(FAKE_NCCL, RTLD_NOW);
  return reinterpret_cast<Function*>(dlsym(library, name));
}
#define FAKE(function) fake<decltype(function)>(#function)

// Polls until the communicator is ready; returns the number of polls before that.
inline int await(Communicator& communicator) {
  int polls = 0;
  const auto until = steady_clock::now() + std::chrono::seconds(20);
  for (; !communicator.ready(); ++polls) {
    if (steady_clock::now() > until) throw Error("never ready");
    std::this_thread::yield();
  }
  return polls;
}

using Body = std::function<void(Communicator&, Queue&)>;

// Runs a body on every rank of a communicator that is ready.
inline void on_ranks(int size, const Body& body, Communicator::Options options = {}) {
  const Bytes id = Communicator::new_id();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Queue queue;
        Communicator communicator(id, size, rank, options);
        CHECK(await(communicator) > 0);
        body(communicator, queue);
      } catch (const std::exception& error) {
        CHECK(false && "a rank threw", error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Returns small numbers; every type can hold them and their sums.
inline Bytes values(DType type, std::size_t count, int seed) {
  constexpr std::uint16_t halves[] = {0, 0x3c00, 0x4000, 0x4200}, brains[] = {0, 0x3f80, 0x4000, 0x4040};
  Bytes data(count * size_of(type));
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t number = (i * 7 + static_cast<std::size_t>(seed) * 3) % 4;
      T value{};
      if constexpr (std::is_same_v<T, Half>) {
        value.bits = halves[number];
      } else if constexpr (std::is_same_v<T, BFloat16>) {
        value.bits = brains[number];
      } else if constexpr (std::is_same_v<T, Bool>) {
        value.byte = number % 2;
      } else {
        value = static_cast<T>(number);
      }
      std::memcpy(data.data() + i * sizeof(T), &value, sizeof(T));
    }
  });
  return data;
}

// Returns the result of the core's kernels for all ranks' values. Averages are divided first, as in NCCL.
inline Bytes folded(DType type, std::size_t count, int size, ReduceOp op) {
  std::vector<Bytes> all;
  std::vector<const std::byte*> sources;
  for (int rank = 0; rank < size; ++rank) all.push_back(values(type, count, rank));
  for (const Bytes& data : all) sources.push_back(data.data());
  Bytes result(count * size_of(type));
  std::byte* destinations[] = {result.data()};
  const bool average = op == ReduceOp::kAverage;
  kernels::reduce(average ? ReduceOp::kSum : op, type, sources, destinations, count, average ? 1.0 / size : 1, 1);
  return result;
}

}  // namespace sordino::test

extern "C" void sordino_fake_enqueue(void* stream, void (*work)(void*), void* argument) {
  static_cast<sordino::test::Queue*>(stream)->put([=] { work(argument); });
}
