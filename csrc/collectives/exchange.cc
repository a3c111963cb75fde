// Data movement of an exchange. Between nodes, a segment goes from the sender's arena into the receiver's buffer. If
// several ranks of a node need a segment from another node, only the first of them receives it. All transfers are
// posted at the beginning, in the order of the segments. Then the ranks of a node share the arithmetic, group by group
// (segments that the topology treats as one). Each rank owns a shard of the elements. It reads this shard in all arenas
// and receive buffers of the node, and writes it in all results. So averages use values from before the exchange,
// nothing is copied within a node, and no rank reads an element that another rank writes. Counters within a node:
//
//   offered = 1                my arena holds the values to be exchanged, and my block its location
//   offered = group + 2        my messages of the group are sent and received (not if all ranks are on one node)
//   reduced = groups + 2       my shards of all groups are done, in all results of the node
#include "collectives/exchange.h"

#include <algorithm>

#include "collectives/collective.h"
#include "collectives/exchange_plan.h"
#include "collectives/nccl_channel.h"
#include "collectives/operations.h"
#include "collectives/shards.h"
#include "collectives/shared_tensors.h"

namespace sordino {
namespace {

class Mixing {
 public:
  Mixing(Participants& participants, const Exchange& what, std::uint64_t round)
      : participants_(participants), what_(what), plan_(participants, what, round) {}

  Task run() {
    NodeMemory& memory = participants_.transport.node_memory();
    const std::size_t bytes = what_.layout->bytes();
    std::byte* buffer =
        plan_.copies() > 0 ? what_.buffer->reserve(plan_.copies(), stride(), plan_.together(), device()) : nullptr;
    SharedBlock* block = participants_.blocks[static_cast<std::size_t>(participants_.me)];
    if (plan_.together()) {
      co_await slots_free(participants_);
      block->location = memory.locate(what_.source, bytes);
      block->result = memory.locate(what_.result, bytes);
      block->buffer = buffer ? memory.locate(buffer, what_.buffer->bytes()) : Location{};
    }
    reach(&SharedBlock::offered, kReady);
    std::vector<std::unique_ptr<Transfer>> receives, sends;
    for (const GroupPlan& plan : plan_.groups()) {
      for (std::size_t index = 0; index < plan.runs.size(); ++index) {
        const LayoutSegment* run = plan.runs[index];
        for (const Parcel& parcel : plan.receives) {
          if (parcel.here != participants_.me) continue;
          std::byte* place = buffer + parcel.copy * stride() + plan.places[index][plan_.place()];
          receives.push_back(participants_.receive(parcel.peer, std::span(place, run->bytes)));
        }
        for (const Parcel& parcel : plan.sends)
          sends.push_back(participants_.send(parcel.peer, std::span(what_.source + run->offset, run->bytes)));
      }
    }
    if (plan_.together()) co_await participants_.all_reached(&SharedBlock::offered, kReady);
    find_vectors(buffer);
    if (plan_.together()) {
      locations_read(participants_, kReady);
      participants_.meet_inputs(kReady);
    }
    auto receive = receives.begin(), send = sends.begin();
    for (std::size_t group = 0; group < plan_.groups().size(); ++group) {
      const GroupPlan& plan = plan_.groups()[group];
      for (std::size_t left = plan.runs.size(); left > 0; --left) {
        for (const Parcel& parcel : plan.receives) {
          if (parcel.here == participants_.me) co_await participants_.finished(**receive++, parcel.peer);
        }
        for (const Parcel& parcel : plan.sends) co_await participants_.finished(**send++, parcel.peer);
      }
      if (plan.averages.empty()) continue;                // empty on one rank of a node: empty on all
      if (plan_.together() && !participants_.one_node) {  // else no other rank's messages matter
        participants_.reach(&SharedBlock::offered, kReady + 1 + group);
        co_await participants_.all_reached(&SharedBlock::offered, kReady + 1 + group);
      }
      co_await mix(plan);
    }
    // After this a rank may change its arena, so all ranks of the node must have done their shards.
    const std::uint64_t last = kReady + plan_.groups().size() + 1;
    if (plan_.together()) co_await participants_.meet(&SharedBlock::reduced, last);
    participants_.stages_used += last;
  }

  // All transfers are one NCCL group. The averages follow on the same queue, so this waits only for NCCL's calls.
  Task run_by_nccl(nccl::Channel& channel) {
    std::byte* buffer = plan_.copies() > 0 ? what_.buffer->reserve(plan_.copies(), stride(), false, device()) : nullptr;
    find_vectors(buffer);
    co_await channel.ready();
    nccl::Group group(channel.communicator());
    for (const GroupPlan& plan : plan_.groups()) put_transfers(plan, channel, buffer);
    group.end();
    co_await channel.ready();
    for (const GroupPlan& plan : plan_.groups()) {
      if (!plan.averages.empty()) mix(plan);
    }
  }

 private:
  static constexpr std::uint64_t kReady = 1;

  void put_transfers(const GroupPlan& plan, nccl::Channel& channel, std::byte* buffer) {
    for (std::size_t index = 0; index < plan.runs.size(); ++index) {
      const LayoutSegment* run = plan.runs[index];
      for (const Parcel& parcel : plan.receives) {
        std::byte* place = buffer + parcel.copy * stride() + plan.places[index][plan_.place()];
        channel.communicator().receive(place, run->bytes, parcel.peer, channel.stream());
      }
      for (const Parcel& parcel : plan.sends) {
        participants_.count_sent(parcel.peer, run->bytes);
        channel.communicator().send(what_.source + run->offset, run->bytes, parcel.peer, channel.stream());
      }
    }
  }

  const std::shared_ptr<Device>& device() const { return participants_.compute->device(); }
  std::size_t stride() const { return plan_.stride(plan_.place()); }

  void reach(std::atomic<std::uint64_t> SharedBlock::* counter, std::uint64_t stage) {
    if (plan_.together()) participants_.reach(counter, stage);
  }

  void find_vectors(std::byte* buffer) {
    NodeMemory& memory = participants_.transport.node_memory();
    for (const int index : plan_.node()) {
      const SharedBlock* block = participants_.blocks[static_cast<std::size_t>(index)];
      const int rank = participants_.ranks[static_cast<std::size_t>(index)];
      const bool mine = index == participants_.me;
      sources_.push_back(mine ? what_.source : memory.map(rank, block->location, device()));
      results_.push_back(mine ? what_.result : memory.map(rank, block->result, device()));
      buffers_.push_back(mine                         ? buffer
                         : block->buffer.segment != 0 ? memory.map(rank, block->buffer, device())
                                                      : nullptr);
    }
  }

  Until mix(const GroupPlan& plan) {
    Until last;
    for (std::size_t index = 0; index < plan.runs.size(); ++index) {
      const LayoutSegment* run = plan.runs[index];
      const std::size_t count = run->bytes / size_of(run->dtype);
      const Shards shards = shards_of(static_cast<int>(plan_.node().size()), run->dtype, count);
      const std::size_t begin = shards.begin(plan_.place()), skip = begin * size_of(run->dtype),
                        offset = run->offset + skip;
      std::vector<const std::byte*> inputs;
      std::vector<std::byte*> outputs;
      for (std::size_t place = 0; place < plan_.node().size(); ++place) {
        inputs.push_back(sources_[place] + offset);
        outputs.push_back(results_[place] + offset);
      }
      for (const Parcel& parcel : plan.receives) {
        const auto owner = static_cast<std::size_t>(std::find(plan_.node().begin(), plan_.node().end(), parcel.here) -
                                                    plan_.node().begin());
        inputs.push_back(buffers_[owner] + parcel.copy * plan_.stride(owner) + plan.places[index][owner] + skip);
      }
      last = participants_.compute->mix(run->dtype, inputs, outputs, plan.averages, shards.end(plan_.place()) - begin);
    }
    return last;
  }

  Participants& participants_;
  const Exchange& what_;
  const ExchangePlan plan_;
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> results_, buffers_;
};

// Between nodes, an all-reduce sends fewer bytes for the mean of all. On one node, both are one pass over memory.
bool is_all_reduce(const Participants& participants, const Exchange& what) {
  return what.topology->is_mean_of_all() && !what.without_own && !participants.one_node;
}

Task mean_of_all(Participants& participants, const Exchange& what) {
  for (int code = 0; code < kDTypeCount; ++code) {
    Pieces pieces(static_cast<DType>(code));
    for (const LayoutSegment& run : what.layout->segments()) {
      if (run.dtype == pieces.dtype())
        pieces.add(what.source + run.offset, what.result + run.offset, run.bytes / size_of(run.dtype));
    }
    co_await allreduce(participants, pieces, ReduceOp::kSum, 1, 1.0 / participants.size());
  }
}

}  // namespace

Task exchange_by_nccl(Participants& participants, const Exchange& what, std::uint64_t round, nccl::Channel& channel) {
  if (is_all_reduce(participants, what)) {
    co_await mean_of_all(participants, what);
    co_return;
  }
  Mixing mixing(participants, what, round);
  co_await mixing.run_by_nccl(channel);
}

Task exchange(Participants& participants, const Exchange& what, std::uint64_t round) {
  if (is_all_reduce(participants, what)) {
    co_await mean_of_all(participants, what);
    co_return;
  }
  Mixing mixing(participants, what, round);
  co_await mixing.run();
}

namespace collectives {
namespace {

Task run(Operation& operation) {
  const Request& request = operation.first();
  co_await come_after(operation, request);
  co_await exchange(*operation.participants, *request.exchange, request.round);
}

}  // namespace

const Collective kExchange{.name = "exchange", .negotiated = false, .run = run};

}  // namespace collectives
}  // namespace sordino
