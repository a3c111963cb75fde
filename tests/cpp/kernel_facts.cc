// Facts for tools/kernel_table.py that the compiler's output does not have. The bytes that a thread has in flight come
// from the operations themselves. The launches of a step are counted while two ranks take it on simulated devices. The
// output is lines of words separated by tabs.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <typeinfo>

#include "collectives/exchange.h"
#include "counting_device.h"
#include "engine/world.h"
#include "kernels/cuda/mix_op.h"
#include "kernels/cuda/unchanged_ops.h"
#include "nccl_ranks.h"
#include "transport/sim/sim.h"

using namespace sordino;
using namespace sordino::test;

namespace {

namespace cuda = kernels::cuda;

std::string readable(const char* name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status),
                                                         &std::free);
  return status == 0 ? text.get() : name;
}

// ---- bytes in flight -----------------------------------------------------------------------------------------------

// Prints the bytes of an operation that reads this many lists at a time, in its widest accesses.
template <class Operation>
void in_flight(int lists) {
  constexpr int kSize = sizeof(typename Operation::Element);
  constexpr int kWidth = Operation::kAccesses == cuda::Accesses::kSingle ? 1 : cuda::kWidest / kSize;
  std::printf("in flight\t%s\t%d\n", readable(typeid(Operation).name()).c_str(),
              Operation::template kAhead<kWidth> * kWidth * kSize * lists);
}

template <class T>
void of_words() {
  in_flight<cuda::Compare<T>>(2);
  in_flight<cuda::CompareAt<T>>(2);
  in_flight<cuda::SaveAt<T>>(1);
}

void all_in_flight() {
  in_flight<cuda::Copy>(1);
  in_flight<cuda::Age>(1);
  for (int code = 0; code < kDTypeCount; ++code) {
    dispatch(static_cast<DType>(code), [](auto tag) {
      using T = typename decltype(tag)::type;
      if constexpr (!std::is_same_v<T, Bool>) in_flight<cuda::Reduce<T>>(1);
      if constexpr (std::is_integral_v<T>) in_flight<cuda::ReduceScaled<T>>(1);
      if constexpr (!std::is_integral_v<T> && !std::is_same_v<T, Bool>) {
        in_flight<cuda::Axpby<T>>(2);
        in_flight<cuda::Lars<T>>(3);
        in_flight<cuda::Mix<T, 512, 64, 4>>(1);
        in_flight<cuda::Mix<T, 4000, 384, 1>>(1);
        in_flight<cuda::SumUp<T, cuda::DotSums>>(2);
        in_flight<cuda::SumUp<T, cuda::DistanceSum>>(2);
        in_flight<cuda::SumUp<T, cuda::SquareSum>>(1);
        in_flight<cuda::Compare<T>>(2);
        in_flight<cuda::CompareAt<T>>(2);
      }
    });
  }
  of_words<std::uint8_t>();
  of_words<std::uint16_t>();
  of_words<std::uint32_t>();
  of_words<std::uint64_t>();
}

// ---- launches ------------------------------------------------------------------------------------------------------

// The number of tensors of ResNet-50, here with odd sizes, and one segment for each of its blocks and ends.
constexpr std::size_t kTensors = 161, kSegments = 18;

std::shared_ptr<const Layout> layout() {
  std::vector<TensorSpec> tensors;
  std::vector<std::size_t> groups;
  for (std::size_t index = 0; index < kTensors; ++index) {
    tensors.push_back({std::to_string(index), DType::kFloat32, {static_cast<std::int64_t>(33 + index)}});
    groups.push_back(index * kSegments / kTensors);
  }
  return std::make_shared<Layout>(tensors, groups);
}

// Prints launches, and the number of words of the largest table among their parameters.
void print(const std::string& what, const std::vector<std::string>& launched) {
  int words = 0;
  for (const std::string& name : launched) {
    const std::string text = readable(name.c_str());
    const std::size_t batch = text.find("Batch<");
    if (batch != std::string::npos) words = std::max(words, std::atoi(text.c_str() + batch + 6));
  }
  std::printf("launches\t%s\t%zu\t%d\n", what.c_str(), launched.size(), words);
}

struct Rank {
  std::unique_ptr<World> world;
  std::shared_ptr<CountingDevice> device;
  std::shared_ptr<Segment> arena;
  std::shared_ptr<ReceiveBuffer> buffer;
  std::vector<std::byte*> tensors;  // at separate addresses
};

// Two ranks of a node whose device memory takes one route.
class Ranks {
 public:
  explicit Ranks(std::string route) : route_(std::move(route)), network_({0, 0}) {
    Config config = Config::from_environment();
    config.gpu_route = route_ == "STAGED" ? "host" : "";
    for (auto& transport : network_.transports()) {
      const int own = route_ == "NCCL" ? static_cast<int>(ranks_.size()) : 0;  // else they share a device
      Rank& rank = ranks_.emplace_back();
      rank.world = std::make_unique<World>(std::move(transport), config);
      rank.device = std::make_shared<CountingDevice>(sim::make_device(own, {true, route_ == "NCCL"}));
      rank.arena = rank.world->node_memory().allocate_on(rank.device, layout_->bytes());
      rank.buffer = std::make_shared<ReceiveBuffer>(rank.world->node_memory());
      for (const TensorSpec& tensor : layout_->tensors()) {
        rank.tensors.push_back(rank.device->allocate(tensor.bytes() + 1));
      }
    }
  }
  ~Ranks() {
    for (Rank& rank : ranks_) {
      for (std::byte* tensor : rank.tensors) rank.device->free(tensor);
      rank.arena.reset();
      rank.buffer.reset();
      rank.world.reset();
    }
  }

  // Prints the launches of the second of two runs, as the first one also sets things up.
  void count(const std::string& what, void (Ranks::*fill)(Rank&, Request&)) {
    for (const bool known : {false, true}) {
      std::vector<std::shared_ptr<Handle>> handles;
      for (Rank& rank : ranks_) {
        rank.device->kernels().taken();
        Request request;
        request.name = what;
        request.device = rank.device;
        (this->*fill)(rank, request);
        handles.push_back(rank.world->submit(std::move(request)));
      }
      for (std::size_t me = 0; me < ranks_.size(); ++me) {
        ranks_[me].world->wait(*handles[me]);
        if (handles[me]->error) std::rethrow_exception(handles[me]->error);
        while (!handles[me]->event->done()) std::this_thread::yield();
      }
      const auto first = ranks_[0].device->kernels().taken(), second = ranks_[1].device->kernels().taken();
      if (first != second) throw Error(what + ": two ranks launch different kernels");
      if (!ranks_[0].world->routes().contains(route_)) throw Error(what + " does not go by " + route_);
      if (known) print(what + ", " + route_, first);
    }
  }
  void average_apart(Rank& rank, Request& request) {
    request.opcode = Opcode::kAllreduce;
    request.op = ReduceOp::kAverage;
    for (std::size_t index = 0; index < kTensors; ++index) {
      std::byte* data = rank.tensors[index];
      request.tensors.push_back({DType::kFloat32, layout_->tensors()[index].shape, data, data});
    }
  }
  void average_arena(Rank& rank, Request& request) {
    request.opcode = Opcode::kAllreduce;
    request.op = ReduceOp::kAverage;
    const auto count = static_cast<std::int64_t>(layout_->bytes() / sizeof(float));
    request.tensors.push_back({DType::kFloat32, {count}, rank.arena->data, rank.arena->data});
  }
  void gossip(Rank& rank, Request& request) {
    const Route route = route_ == "NCCL" ? Route::kNccl : route_ == "IPC" ? Route::kDirect : Route::kHost;
    request.opcode = Opcode::kExchange;
    request.exchange = std::make_shared<Exchange>(Exchange{layout_, topology_, rank.arena->data, rank.arena->data,
                                                           route != Route::kNccl, false, rank.buffer, route});
  }

  const std::shared_ptr<const Layout> layout_ = layout();
  const std::shared_ptr<const topology::Topology> topology_ = std::make_shared<topology::RandomCycle>(2, 5);

 private:
  const std::string route_;
  sim::Network network_;
  std::vector<Rank> ranks_;
};

// Counts the calls of python/sordino/torch/lars.py and of the detectors of python/sordino/algorithms/caps.
void count_calls() {
  const auto device = std::make_shared<CountingDevice>(sim::make_device(0));
  CountingKernels& kernels = device->kernels();
  const auto all = layout();
  const Stream stream = device->queue();
  const auto wait = [&] {
    const auto event = device->record(stream);
    while (!event->done()) std::this_thread::yield();
  };
  std::vector<Bytes> arrays(8, Bytes(all->bytes()));
  Rows singles{1, {}, {}}, triples{3, {}, {}};
  std::vector<kernels::Item> tensors;
  for (std::size_t index = 0; index < kTensors; ++index) {
    const std::size_t offset = all->offsets()[index], count = all->tensors()[index].count();
    singles.addresses.push_back(arrays[0].data() + offset);
    for (std::size_t list = 0; list < 3; ++list) triples.addresses.push_back(arrays[list].data() + offset);
    singles.counts.push_back(count), triples.counts.push_back(count);
    tensors.push_back({offset, count, DType::kFloat32});
  }
  std::vector<double> norms(kTensors), rates(kTensors);
  const std::vector<std::uint8_t> scaled(kTensors, 1);
  kernels.norms(DType::kFloat32, singles, norms.data(), stream);
  kernels.norms(DType::kFloat32, singles, norms.data(), stream);
  kernels.lars_rates(norms.data(), norms.data(), scaled, rates.data(), {0.1, 0.001, 0, 1e-8}, stream);
  kernels.lars_step(DType::kFloat32, triples, rates.data(), {0, 0.9, false}, stream);
  wait();
  print("a step of LARS", kernels.taken());

  const kernels::Items items(tensors, 0.01);
  std::byte *counts = arrays[3].data(), *counters = arrays[4].data(), *indices = arrays[5].data(),
            *saved = arrays[6].data();
  const auto counted = [&](const char* what, const auto& call) {
    call();
    wait();
    print(what, kernels.taken());
  };
  std::byte *now = arrays[0].data(), *before = arrays[1].data();
  counted("unchanged elements", [&] { kernels.unchanged(items, now, before, counts, -1, nullptr, stream); });
  counted("unchanged elements, with counters",
          [&] { kernels.unchanged(items, now, before, counts, -1, counters, stream); });
  counted("a sample drawn, and saved", [&] {
    kernels.draw(items, 1, indices, stream);
    kernels.save_at(items, now, indices, saved, stream);
  });
  counted("a sample of what moved most", [&] { kernels.select(items, counters, indices, stream); });
  counted("unchanged samples", [&] { kernels.unchanged_at(items, now, saved, indices, counts, -1, stream); });
}

}  // namespace

int main() {
  setenv("SORDINO_NCCL", FAKE_NCCL, 1);
  FAKE(fake_nccl_set_enqueue)([](void* stream, void (*work)(void*), void* argument) {
    sim::enqueue(reinterpret_cast<Stream>(stream), [=] { work(argument); });
  });
  all_in_flight();
  for (const char* route : {"NCCL", "IPC", "STAGED"}) {
    Ranks ranks(route);
    ranks.count("all-reduce of tensors that lie apart", &Ranks::average_apart);
    ranks.count("all-reduce of an arena", &Ranks::average_arena);
    ranks.count("gossip of an arena's segments", &Ranks::gossip);
  }
  count_calls();
  return 0;
}
