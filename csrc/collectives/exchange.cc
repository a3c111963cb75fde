// How an exchange moves its bytes. What crosses nodes goes from the sender's arena into the receiver's inbox, a segment
// after the other, all posted at once; what a node needs from one rank of another travels once, to the first rank
// there that needs it. Then, segment by segment, the ranks of a node share the arithmetic: each owns a shard of
// the elements, reads them in all arenas and inboxes of the node, and writes all results. So averages are made of
// values before the exchange, with no copy within a node, and nobody ever reads an arena while it is being written:
//
//   offered = 1                my arena holds the values to be exchanged, and my desk says where it is
//   offered = segment + 2      my messages of the segment have left and arrived
//   reduced = segments + 1     my shards of all segments are done, in all arenas of the node
#include "collectives/exchange.h"

#include <algorithm>

#include "collectives/operations.h"
#include "collectives/shards.h"
#include "kernels/mix.h"

namespace sordino {

std::byte* Inbox::reserve(std::size_t copies, std::size_t bytes, bool shared, const std::shared_ptr<Device>& device) {
  if (copies * bytes > bytes_ || device != device_) {
    bytes_ = copies * bytes;
    device_ = device;
    segment_ = nullptr;
    private_ = nullptr;
    if (device) {
      segment_ = memory_.allocate_on(device, bytes_);
    } else if (shared) {
      segment_ = memory_.allocate(bytes_);
    } else {
      private_ = std::make_unique_for_overwrite<std::byte[]>(bytes_);
    }
  }
  return segment_ ? segment_->data : private_.get();
}

namespace {

// A segment on its way between nodes.
struct Parcel {
  int peer;          // index of the participant on the other node
  int here;          // index of the rank of this node that sends or receives it
  std::size_t copy;  // of what the receiver's inbox is for
};

// One group of the layout: its runs, what crosses nodes for it, and the averages of this node's ranks.
struct Plan {
  std::vector<const LayoutSegment*> runs;
  std::vector<Parcel> sends, receives;  // this rank's sends; the receives of all ranks of the node
  std::vector<kernels::Average> averages;
  // By run and rank of the node: where the run lies in a copy in that rank's inbox, if it receives it.
  std::vector<std::vector<std::size_t>> places;
};

class Mixing {
 public:
  Mixing(Team& team, const Exchange& what) : team_(team), what_(what) {
    for (int index = 0; index < team.size(); ++index) {
      if (here(index)) node_.push_back(index);
    }
    place_ = static_cast<std::size_t>(std::find(node_.begin(), node_.end(), team.me) - node_.begin());
    for (const LayoutSegment& run : what.layout->segments()) {
      if (plans_.empty() || plans_.back().runs.front()->group != run.group) plans_.emplace_back();
      plans_.back().runs.push_back(&run);
    }
    strides_.resize(node_.size());
    for (Plan& plan : plans_) fill(plan);
  }

  Task run() {
    NodeMemory& memory = team_.transport.node_memory();
    const std::size_t bytes = what_.layout->bytes();
    std::byte* inbox = copies_ > 0 ? what_.inbox->reserve(copies_, strides_[place_], together(), device()) : nullptr;
    Desk* desk = team_.desks[static_cast<std::size_t>(team_.me)];
    if (together()) {
      desk->location = memory.locate(what_.source, bytes);
      desk->result = memory.locate(what_.result, bytes);
      desk->inbox = inbox ? memory.locate(inbox, what_.inbox->bytes()) : Location{};
    }
    reach(&Desk::offered, kReady);
    std::vector<std::unique_ptr<Transfer>> receives, sends;
    for (const Plan& plan : plans_) {
      for (std::size_t index = 0; index < plan.runs.size(); ++index) {
        const LayoutSegment* run = plan.runs[index];
        for (const Parcel& parcel : plan.receives) {
          if (parcel.here != team_.me) continue;
          std::byte* place = inbox + parcel.copy * strides_[place_] + plan.places[index][place_];
          receives.push_back(team_.receive(parcel.peer, std::span(place, run->bytes)));
        }
        for (const Parcel& parcel : plan.sends)
          sends.push_back(team_.send(parcel.peer, std::span(what_.source + run->offset, run->bytes)));
      }
    }
    if (together()) co_await team_.all_reached(&Desk::offered, kReady);
    find_vectors(inbox);
    auto receive = receives.begin(), send = sends.begin();
    for (std::size_t group = 0; group < plans_.size(); ++group) {
      const Plan& plan = plans_[group];
      for (std::size_t left = plan.runs.size(); left > 0; --left) {
        for (const Parcel& parcel : plan.receives) {
          if (parcel.here == team_.me) co_await team_.finished(**receive++, parcel.peer);
        }
        for (const Parcel& parcel : plan.sends) co_await team_.finished(**send++, parcel.peer);
      }
      if (plan.averages.empty()) continue;  // on all ranks of the node
      reach(&Desk::offered, kReady + 1 + group);
      if (together()) co_await team_.all_reached(&Desk::offered, kReady + 1 + group);
      co_await mix(plan);
    }
    // A rank that goes on may change its arena, so all shards of it must be done.
    const std::uint64_t last = kReady + plans_.size();
    reach(&Desk::reduced, last);
    if (together()) co_await team_.all_reached(&Desk::reduced, last);
    team_.stages_used += last;
  }

  // All on one queue of the device, so nothing but NCCL's calls is waited for.
  Task run_by_nccl(nccl::Channel& channel) {
    std::byte* inbox = copies_ > 0 ? what_.inbox->reserve(copies_, strides_[place_], false, device()) : nullptr;
    find_vectors(inbox);
    for (const Plan& plan : plans_) {
      co_await channel.ready();
      put_transfers(plan, channel, inbox);
      co_await channel.ready();
      if (!plan.averages.empty()) mix(plan);
    }
  }

 private:
  static constexpr std::uint64_t kReady = 1;

  void put_transfers(const Plan& plan, nccl::Channel& channel, std::byte* inbox) {
    nccl::Group group(channel.communicator());
    for (std::size_t index = 0; index < plan.runs.size(); ++index) {
      const LayoutSegment* run = plan.runs[index];
      for (const Parcel& parcel : plan.receives) {
        std::byte* place = inbox + parcel.copy * strides_[place_] + plan.places[index][place_];
        channel.communicator().receive(place, run->bytes, parcel.peer, channel.stream());
      }
      for (const Parcel& parcel : plan.sends) {
        team_.count_sent(parcel.peer, run->bytes);
        channel.communicator().send(what_.source + run->offset, run->bytes, parcel.peer, channel.stream());
      }
    }
    group.end();
  }

  const std::shared_ptr<Device>& device() const { return team_.compute->device(); }
  bool together() const { return node_.size() > 1; }
  // Whether this rank reads the participant's arena itself.
  bool here(int index) const {
    return index == team_.me || (what_.shared && team_.desks[static_cast<std::size_t>(index)]);
  }
  bool same_node(int a, int b) const {
    const auto& node_of = team_.transport.node_of();
    return a == b || (what_.shared && node_of[static_cast<std::size_t>(team_.ranks[static_cast<std::size_t>(a)])] ==
                                          node_of[static_cast<std::size_t>(team_.ranks[static_cast<std::size_t>(b)])]);
  }

  void reach(std::atomic<std::uint64_t> Desk::* counter, std::uint64_t stage) {
    if (together()) team_.reach(counter, stage);
  }

  void fill(Plan& plan) {
    const topology::At at{what_.round, static_cast<std::uint32_t>(plan.runs.front()->group)};
    std::vector<int> destinations;
    what_.topology->destinations(at, team_.me, destinations);
    std::sort(destinations.begin(), destinations.end());
    std::vector<int> served;  // the first destination on each other node
    std::size_t bytes = 0;
    for (const LayoutSegment* run : plan.runs) bytes += run->bytes;
    for (const int destination : destinations) {
      if (here(destination)) {
        team_.count_sent(destination, bytes);
      } else if (std::none_of(served.begin(), served.end(), [&](int other) { return same_node(other, destination); })) {
        served.push_back(destination);
        plan.sends.push_back({destination, team_.me, 0});
      }
    }
    topology::Row row;
    for (std::size_t place = 0; place < node_.size(); ++place) {
      what_.topology->row(at, node_[place], row);
      add(plan, static_cast<int>(place), row);
    }
    // Inboxes have room for what is received, and no more: a server of parts gets them from many.
    for (const LayoutSegment* run : plan.runs) {
      std::vector<std::size_t>& places = plan.places.emplace_back(strides_);
      for (std::size_t place = 0; place < node_.size(); ++place) {
        if (std::any_of(plan.receives.begin(), plan.receives.end(),
                        [&](const Parcel& parcel) { return parcel.here == node_[place]; })) {
          strides_[place] =
              (places[place] + run->bytes + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
        }
      }
    }
  }

  // Vectors are numbered: first the ranks of the node, then the messages in the order of plan.receives.
  void add(Plan& plan, int place, const topology::Row& row) {
    if (row.sources.empty() && row.keeps_own && row.scale == 1 && !what_.without_own && what_.source == what_.result)
      return;
    kernels::Average average{{}, {place}, row.scale};
    if (row.keeps_own && !what_.without_own) average.of.push_back(place);
    for (const int source : row.sources)
      average.of.push_back(number_of(plan, source, node_[static_cast<std::size_t>(place)]));
    // All ranks that mix the same values mix them in the same order: equal bits.
    std::sort(average.of.begin(), average.of.end(),
              [&](int a, int b) { return participant(plan, a) < participant(plan, b); });
    for (kernels::Average& known : plan.averages) {
      if (known.of != average.of || known.scale != average.scale) continue;
      known.into.push_back(place);
      return;
    }
    plan.averages.push_back(std::move(average));
  }

  int participant(const Plan& plan, int number) const {
    const auto index = static_cast<std::size_t>(number);
    return index < node_.size() ? node_[index] : plan.receives[index - node_.size()].peer;
  }

  int number_of(Plan& plan, int source, int needed_by) {
    const auto found = std::find(node_.begin(), node_.end(), source);
    if (found != node_.end()) return static_cast<int>(found - node_.begin());
    const auto known = std::find_if(plan.receives.begin(), plan.receives.end(),
                                    [&](const Parcel& parcel) { return parcel.peer == source; });
    const auto place = static_cast<int>(known - plan.receives.begin());
    if (known == plan.receives.end()) {
      const auto copy = static_cast<std::size_t>(std::count_if(
          plan.receives.begin(), plan.receives.end(), [&](const Parcel& parcel) { return parcel.here == needed_by; }));
      plan.receives.push_back({source, needed_by, copy});
      if (needed_by == team_.me) copies_ = std::max(copies_, copy + 1);
    }
    return static_cast<int>(node_.size()) + place;
  }

  void find_vectors(std::byte* inbox) {
    NodeMemory& memory = team_.transport.node_memory();
    for (const int index : node_) {
      const Desk* desk = team_.desks[static_cast<std::size_t>(index)];
      const int rank = team_.ranks[static_cast<std::size_t>(index)];
      const bool mine = index == team_.me;
      sources_.push_back(mine ? what_.source : memory.map(rank, desk->location, device()));
      results_.push_back(mine ? what_.result : memory.map(rank, desk->result, device()));
      inboxes_.push_back(mine ? inbox : desk->inbox.segment != 0 ? memory.map(rank, desk->inbox, device()) : nullptr);
    }
  }

  Until mix(const Plan& plan) {
    Until last;
    for (std::size_t index = 0; index < plan.runs.size(); ++index) {
      const LayoutSegment* run = plan.runs[index];
      const std::size_t count = run->bytes / size_of(run->dtype);
      const Shards shards = shards_of(static_cast<int>(node_.size()), run->dtype, count);
      const std::size_t begin = shards.begin(place_), skip = begin * size_of(run->dtype), offset = run->offset + skip;
      std::vector<const std::byte*> inputs;
      std::vector<std::byte*> outputs;
      for (std::size_t place = 0; place < node_.size(); ++place) {
        inputs.push_back(sources_[place] + offset);
        outputs.push_back(results_[place] + offset);
      }
      for (const Parcel& parcel : plan.receives) {
        const auto owner = static_cast<std::size_t>(std::find(node_.begin(), node_.end(), parcel.here) - node_.begin());
        inputs.push_back(inboxes_[owner] + parcel.copy * strides_[owner] + plan.places[index][owner] + skip);
      }
      last = team_.compute->mix(run->dtype, inputs, outputs, plan.averages, shards.end(place_) - begin);
    }
    return last;
  }

  Team& team_;
  const Exchange& what_;
  std::vector<int> node_;  // participants whose memory this rank reaches, itself included, in order
  std::size_t place_ = 0;  // of this rank in node_
  std::vector<Plan> plans_;
  std::size_t copies_ = 0;            // that this rank's inbox needs room for
  std::vector<std::size_t> strides_;  // bytes of a copy in the inbox of each rank of the node
  std::vector<const std::byte*> sources_;
  std::vector<std::byte*> results_, inboxes_;
};

}  // namespace

Task exchange_by_nccl(Team& team, const Exchange& what, nccl::Channel& channel) {
  Mixing mixing(team, what);
  co_await mixing.run_by_nccl(channel);
}

Task come_after(Team& team, const Exchange& what) {
  if (!what.after) co_return;
  team.dormant = true;
  co_await until([&what] { return what.after->done(); });
  team.dormant = false;
  if (what.after->error) std::rethrow_exception(what.after->error);
}

Task exchange(Team& team, const Exchange& what) {
  co_await come_after(team, what);
  Mixing mixing(team, what);
  co_await mixing.run();
}

}  // namespace sordino
