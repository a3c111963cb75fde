// Gossip by NCCL, on the stand-in for NCCL and simulated devices: all segments of an exchange travel in one group. In
// any order of the ranks, results are the topology's averages of the values before the exchange.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "collectives/exchange.h"
#include "device/sim/sim_device.h"
#include "engine/world.h"
#include "nccl_ranks.h"
#include "transport/sim/sim.h"

using namespace sordino;
using namespace sordino::test;

namespace {

constexpr int kSegments = 7;

// Segments of two dtypes; the third one has parts of both.
std::shared_ptr<const Layout> layout() {
  std::vector<TensorSpec> tensors;
  std::vector<std::size_t> groups;
  for (std::size_t segment = 0; segment < kSegments; ++segment) {
    for (const DType type : {DType::kFloat32, DType::kFloat64}) {
      if ((type == DType::kFloat64) != (segment % 2 != 0) && segment != 2) continue;
      tensors.push_back({std::to_string(tensors.size()), type, {static_cast<std::int64_t>(37 + 100 * segment)}});
      groups.push_back(segment);
    }
  }
  return std::make_shared<Layout>(tensors, groups);
}

struct Rank {
  std::unique_ptr<World> world;
  std::shared_ptr<Device> device;
  std::shared_ptr<ReceiveBuffer> buffer;
  std::byte* arena;
};

class Ranks {
 public:
  explicit Ranks(int size) : layout_(layout()), network_(std::vector<int>(static_cast<std::size_t>(size))) {
    topology_ = std::make_shared<topology::RandomCycle>(size, 5);
    Config config = Config::from_environment();
    config.timeout_s = 30;
    for (auto& transport : network_.transports()) {
      const int number = static_cast<int>(ranks_.size());
      Rank& rank = ranks_.emplace_back();
      rank.world = std::make_unique<World>(std::move(transport), config);
      rank.device = sim::make_device(number, {true, true});
      rank.buffer = std::make_shared<ReceiveBuffer>(rank.world->node_memory());
      rank.arena = rank.device->allocate(layout_->bytes());
    }
  }
  ~Ranks() {
    for (Rank& rank : ranks_) {
      rank.world.reset();
      rank.buffer.reset();
      rank.device->free(rank.arena);
    }
  }

  // Makes an exchange to which the ranks come in this order.
  void exchange(std::uint64_t round, const std::vector<std::size_t>& order) {
    std::vector<Bytes> before;
    std::vector<int> groups;
    std::vector<std::shared_ptr<Handle>> held, handles;
    for (std::size_t me = 0; me < ranks_.size(); ++me) {
      for (const LayoutSegment& run : layout_->segments()) {
        const Bytes own =
            values(run.dtype, run.bytes / size_of(run.dtype), static_cast<int>(round + me + 3 * run.group));
        std::memcpy(ranks_[me].arena + run.offset, own.data(), own.size());
      }
      before.emplace_back(ranks_[me].arena, ranks_[me].arena + layout_->bytes());
      groups.push_back(FAKE(fake_nccl_groups)(static_cast<int>(me)));
      held.push_back(std::make_shared<Handle>());
      handles.push_back(submit(ranks_[me], round, held.back()));
    }
    for (const std::size_t me : order) {
      held[me]->finish();
      ranks_[me].world->wake();
      std::this_thread::sleep_for(milliseconds(3));
    }
    for (std::size_t me = 0; me < ranks_.size(); ++me) {
      ranks_[me].world->wait(*handles[me]);
      if (handles[me]->error) std::rethrow_exception(handles[me]->error);
      while (!handles[me]->event->done()) std::this_thread::yield();
    }
    for (std::size_t me = 0; me < ranks_.size(); ++me) {
      const Bytes after(ranks_[me].arena, ranks_[me].arena + layout_->bytes());
      CHECK(after == expected(round, before, me), "round", round, "rank", me);
      CHECK(FAKE(fake_nccl_groups)(static_cast<int>(me)) == groups[me] + 1, "round", round, "rank", me);
    }
  }

 private:
  std::shared_ptr<Handle> submit(Rank& rank, std::uint64_t round, std::shared_ptr<const Handle> after) {
    Request request;
    request.name = "exchange";
    request.opcode = Opcode::kExchange;
    request.device = rank.device;
    request.round = round;
    request.after = std::move(after);
    request.exchange = std::make_shared<Exchange>(
        Exchange{layout_, topology_, rank.arena, rank.arena, false, false, rank.buffer, Route::kNccl});
    return rank.world->submit(std::move(request));
  }

  // Returns the sums in the order of the ranks.
  Bytes expected(std::uint64_t round, const std::vector<Bytes>& before, std::size_t me) const {
    Bytes all = before[me];
    for (const LayoutSegment& run : layout_->segments()) {
      topology::Row row;
      topology_->row({round, static_cast<std::uint32_t>(run.group)}, static_cast<int>(me), row);
      std::vector<int> of = row.sources;
      of.push_back(static_cast<int>(me));
      std::sort(of.begin(), of.end());
      std::vector<const std::byte*> sources;
      for (const int rank : of) sources.push_back(before[static_cast<std::size_t>(rank)].data() + run.offset);
      std::byte* destinations[] = {all.data() + run.offset};
      kernels::reduce(ReduceOp::kSum, run.dtype, sources, destinations, run.bytes / size_of(run.dtype), 1, row.scale);
    }
    return all;
  }

  const std::shared_ptr<const Layout> layout_;
  std::shared_ptr<const topology::Topology> topology_;
  sim::Network network_;
  std::vector<Rank> ranks_;
};

}  // namespace

int main() {
  setenv("SORDINO_NCCL", FAKE_NCCL, 1);
  FAKE(fake_nccl_set_enqueue)([](void* stream, void (*work)(void*), void* argument) {
    sim::enqueue(reinterpret_cast<Stream>(stream), [=] { work(argument); });
  });
  for (const int size : {2, 4}) {
    Ranks ranks(size);
    std::vector<std::size_t> order(static_cast<std::size_t>(size));
    std::iota(order.begin(), order.end(), 0);
    std::uint64_t round = 0;
    do {
      ranks.exchange(round++, order);
    } while (std::next_permutation(order.begin(), order.end()));
  }
  CHECK(FAKE(fake_nccl_live)() == 0);
  return report();
}
