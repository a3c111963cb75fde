// All-reduce among several nodes, some of which have several participants. Each participant has a stripe of the vector,
// together with one participant of each other node. It folds the stripe's values of its node in shared memory, then
// those of all nodes by messages, and its node copies the result from it. So a node's link carries as much as with one
// rank per node, 2(H-1)/H of the vector for H nodes, and all ranks of a node keep the link busy.
//
// The vector is reduced in parts, several of them side by side. If all tensors of a node lie in shared segments, they
// are folded there, and results are written to all of them. Other tensors pass through memory that the node maps, where
// part k takes the room of part k - kRooms:
//
//   copy in    my input of the part, except my own stripe  -> my memory    offered  = stage(part)
//   fold       my stripe: my input and the peers' memory   -> my memory
//   team       my stripe, with those of the other nodes                    reduced  = stage(part)
//   copy out   all stripes from their owners' memory       -> output       finished = stage(part)
//
// No rank copies part k + kRooms in before all have copied part k out: stripes of a shorter part lie elsewhere.
//
// Nodes may differ in this. If a node has more ranks than another, some of its ranks have no stripe.
#include <array>
#include <cstring>
#include <optional>
#include <set>

#include "collectives/flat.h"
#include "collectives/operations.h"
#include "collectives/shards.h"
#include "collectives/shared_tensors.h"
#include "collectives/team_allreduce.h"

namespace sordino {
namespace {

constexpr std::size_t kRooms = std::size_t{2} << kTagLaneBits;

class Striped {
 public:
  Striped(Participants& participants, const Sites& sites, Pieces& pieces, ReduceOp op, double pre, double post)
      : participants_(participants),
        pieces_(pieces),
        op_(op),
        pre_(pre),
        width_(size_of(pieces.dtype())),
        site_(sites.own()),
        place_(sites.place),
        teams_(topology::teams_of(sites.all, TeamAllreduce::is_small(pieces.bytes()))),
        stripes_(teams_.size()),
        cut_(TeamAllreduce::cut(pieces.count(), pieces.dtype(), static_cast<int>(sites.all.size()),
                                static_cast<int>(stripes_))),
        parts_((pieces.count() + cut_.most - 1) / cut_.most) {
    if (place_ >= stripes_) return;
    team_.emplace(Team{participants, teams_[place_], static_cast<int>(sites.mine)}, pieces.dtype(), op, post,
                  TeamAllreduce::is_small(pieces.bytes()));
  }

  // Runs on a rank that is alone on its node.
  Task run_alone() {
    Flat flat(*participants_.compute, pieces_);
    co_await flat.begin(1);
    vectors_ = {flat.data()};
    co_await together(lanes());
    co_await flat.finish(1);
  }

  Task run() {
    participants_.traffic.count_all_reduce(pieces_.bytes(), site_.size(), place_, [this](std::size_t place) {
      return participants_.ranks[static_cast<std::size_t>(site_[place])];
    });
    if (pieces_.bytes() >= kLeastInPlace) co_await find_shared(participants_, pieces_, vectors_);
    if (parts_ > 1) participants_.patience = 0;  // a task that polls would keep the others waiting
    if (vectors_.empty()) {
      co_await run_through_memory();
      co_return;
    }
    final_ = [this](const std::byte* data, std::size_t bytes) {
      for (std::size_t peer = 0; peer < vectors_.size(); ++peer) {
        if (peer != place_) std::memcpy(vectors_[peer] + (data - vectors_[place_]), data, bytes);
      }
    };
    co_await together(lanes());
    participants_.reach(&SharedBlock::reduced, kOfferStage);
    co_await participants_.all_reached(&SharedBlock::reduced, kOfferStage);
    participants_.stages_used += kOfferStage;
  }

 private:
  Task run_through_memory() {
    std::byte* own = nullptr;
    co_await take_staging(participants_, std::min(parts_, kRooms) * part_bytes(), own);
    copy_in(0);
    co_await participants_.all_reached(&SharedBlock::offered, stage(0));
    for (const int index : site_) rooms_.push_back(staging_of(participants_, index));
    std::vector<Task> tasks = lanes();
    if (!team_) participants_.reach(&SharedBlock::reduced, stage(parts_ - 1));
    tasks.push_back(copies_in());
    tasks.push_back(copies_out());
    co_await together(std::move(tasks));
    slots_used(participants_, stage(parts_ - 1));
    participants_.stages_used += stage(parts_ - 1);
  }

  std::vector<Task> lanes() {
    std::vector<Task> tasks;
    for (std::size_t lane = 0; team_ && lane < cut_.lanes; ++lane) tasks.push_back(along_lane(lane));
    return tasks;
  }

  Task along_lane(std::size_t lane) {
    const std::size_t most = shards_at(0).end(0);  // of the first part, which is no shorter than others
    const auto received = participants_.compute->scratch(team_->room(most + shards_at(0).grain));
    for (std::size_t part = lane; part < parts_; part += cut_.lanes) {
      if (!rooms_.empty()) {
        co_await until([this, part] { return copied_in_ > part; });
        co_await participants_.all_reached(&SharedBlock::offered, stage(part));
      }
      const Shards stripes = shards_at(part);
      const std::size_t begin = stripes.begin(place_), end = stripes.end(place_);
      fold(part, begin, end);
      std::byte* mine = rooms_.empty() ? vectors_[place_] + part * part_bytes() : room(place_, part);
      co_await team_->run(mine + begin * width_, end - begin, received.get(), static_cast<Tag>(lane), final_);
      if (!rooms_.empty()) say_reduced(part);
    }
  }

  // Folds my stripe of my node's values into my vector or memory.
  void fold(std::size_t part, std::size_t begin, std::size_t end) {
    const std::size_t base = part * cut_.most;
    std::vector<const std::byte*> sources(site_.size());
    if (rooms_.empty()) {
      if (sources.size() == 1 && pre_ == 1) return;
      const std::size_t at = (base + begin) * width_;
      std::transform(vectors_.begin(), vectors_.end(), sources.begin(),
                     [at](const std::byte* vector) { return vector + at; });
      std::byte* into = vectors_[place_] + at;
      kernels::reduce(op_, pieces_.dtype(), sources, {&into, 1}, end - begin, pre_, 1);
      return;
    }
    pieces_.visit(base + begin, base + end,
                  [&](const std::byte* input, std::byte*, std::size_t count, std::size_t offset) {
                    const std::size_t at = (begin + offset) * width_;
                    for (std::size_t peer = 0; peer < sources.size(); ++peer)
                      sources[peer] = peer == place_ ? input : room(peer, part) + at;
                    std::byte* into = room(place_, part) + at;
                    kernels::reduce(op_, pieces_.dtype(), sources, {&into, 1}, count, pre_, 1);
                  });
  }

  // The counter stands for all parts up to its value, so parts are counted in order.
  void say_reduced(std::size_t part) {
    ahead_.insert(part);
    while (ahead_.erase(reduced_)) participants_.reach(&SharedBlock::reduced, stage(reduced_++));
  }

  void copy_in(std::size_t part) {
    const Shards stripes = shards_at(part);
    const std::size_t base = part * cut_.most, begin = team_ ? stripes.begin(place_) : stripes.count,
                      end = team_ ? stripes.end(place_) : stripes.count;
    std::byte* into = participants_.staging->data() + part % kRooms * part_bytes();
    pieces_.copy_in(base, base + begin, into);
    pieces_.copy_in(base + end, base + stripes.count, into + end * width_);
    participants_.reach(&SharedBlock::offered, stage(part));
    copied_in_ = part + 1;
  }

  Task copies_in() {
    for (std::size_t part = 1; part < parts_; ++part) {
      if (part >= kRooms) {
        co_await until([this, part] { return copied_out_ > part - kRooms; });
        co_await participants_.all_reached(&SharedBlock::finished, stage(part - kRooms));
      }
      copy_in(part);
      co_await others_first();
    }
  }

  Task copies_out() {
    for (std::size_t part = 0; part < parts_; ++part) {
      co_await until([this, part] { return !team_ || reduced_ > part; });
      co_await participants_.all_reached(&SharedBlock::reduced, stage(part));
      const Shards stripes = shards_at(part);
      const std::size_t base = part * cut_.most;
      for (std::size_t owner = 0; owner < stripes_; ++owner) {
        const std::size_t begin = stripes.begin(owner);
        pieces_.copy_out(base + begin, base + stripes.end(owner), room(owner, part) + begin * width_);
      }
      participants_.reach(&SharedBlock::finished, stage(part));
      copied_out_ = part + 1;
      co_await others_first();
    }
  }

  static std::uint64_t stage(std::size_t part) { return kOfferStage + 1 + part; }
  std::size_t part_bytes() const { return std::min(cut_.most, pieces_.count()) * width_; }
  Shards shards_at(std::size_t part) const {
    return shards_of(static_cast<int>(stripes_), pieces_.dtype(),
                     std::min(cut_.most, pieces_.count() - part * cut_.most));
  }
  std::byte* room(std::size_t peer, std::size_t part) const { return rooms_[peer] + part % kRooms * part_bytes(); }

  Participants& participants_;
  Pieces& pieces_;
  const ReduceOp op_;
  const double pre_;
  const std::size_t width_;
  const std::vector<int>& site_;
  const std::size_t place_;
  const std::vector<std::vector<int>> teams_;
  const std::size_t stripes_;
  const TeamAllreduce::Cut cut_;
  const std::size_t parts_;
  std::optional<const TeamAllreduce> team_;  // empty without a stripe
  TeamAllreduce::Final final_;
  std::vector<std::byte*> vectors_;                           // of the site: whole vectors, if they are folded in place
  std::vector<std::byte*> rooms_;                             // else each rank's memory
  std::size_t copied_in_ = 0, reduced_ = 0, copied_out_ = 0;  // parts
  std::set<std::size_t> ahead_;                               // parts reduced before an earlier one
};

}  // namespace

Task allreduce_nodes(Participants& participants, const Sites& sites, Pieces& pieces, ReduceOp op, double pre,
                     double post) {
  Striped striped(participants, sites, pieces, op, pre, post);
  if (sites.own().size() == 1) {
    co_await striped.run_alone();
  } else {
    co_await striped.run();
  }
}

}  // namespace sordino
