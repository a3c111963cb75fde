// Averaging among the ranks of one node through shared memory. Every rank owns a shard: it alone reads that shard
// from everybody, folds it in rank order, and hands the result to everybody, so all ranks get the same bits.
//
// Tensors that lie in shared segments are averaged in place, in one pass: the owner reads its shard in all arenas and
// writes all arenas. Others pass through the ranks' staging slots in chunks small enough to stay in cache:
//
//   copy in    my input of the chunk, except my own shard  -> my slot          offered  = chunk + 1
//   reduce     my shard: my input and the peers' slots     -> output, my slot  reduced  = chunk + 1
//   copy out   the peers' shards from their slots          -> output           finished = chunk + 1
//
// A slot is written again only when every peer has finished with the chunk before it in that slot.
#include <array>

#include "collectives/operations.h"
#include "collectives/shards.h"

namespace sordino {
namespace {

// Smaller tensors are not worth the extra round in which ranks tell each other where theirs lie.
constexpr std::size_t kLeastInPlace = 32 * 1024;
constexpr std::uint64_t kOfferStage = 1;  // stages of chunks start after it

void count_bytes(Team& team, std::size_t bytes) {
  // As in a ring: each rank gives away (N-1)/N of its input, and N-1 copies of its result shard.
  const std::size_t parts = static_cast<std::size_t>(team.size());
  team.traffic.inside.fetch_add(2 * (bytes - bytes / parts), std::memory_order_relaxed);
}

Task in_place(Team& team, Pieces& pieces, const std::vector<std::byte*>& tensors, ReduceOp op, double pre,
              double post) {
  const Shards shards = shards_of(team.size(), pieces.dtype(), pieces.count());
  const auto me = static_cast<std::size_t>(team.me);
  const std::size_t offset = shards.begin(me) * size_of(pieces.dtype());
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> destinations;
  for (std::byte* tensor : tensors) {
    sources.push_back(tensor + offset);
    destinations.push_back(tensor + offset);
  }
  co_await team.compute->reduce(op, pieces.dtype(), sources, destinations, shards.end(me) - shards.begin(me), pre,
                                post);
  team.reach(&Desk::reduced, kOfferStage);
  co_await team.all_reached(&Desk::reduced, kOfferStage);
}

class Staging {
 public:
  Staging(Team& team, Pieces& pieces, ReduceOp op, double pre, double post)
      : team_(team),
        pieces_(pieces),
        op_(op),
        pre_(pre),
        post_(post),
        width_(size_of(pieces.dtype())),
        per_chunk_(team.chunk / width_),
        me_(static_cast<std::size_t>(team.me)) {}

  std::uint64_t chunks() const { return (pieces_.count() + per_chunk_ - 1) / per_chunk_; }

  void copy_in(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    std::byte* slot = slot_of(me_, chunk);
    for (const auto& [begin, end] :
         {std::pair{std::size_t{0}, shards.begin(me_)}, std::pair{shards.end(me_), shards.count}}) {
      pieces_.copy_in(chunk * per_chunk_ + begin, chunk * per_chunk_ + end, slot + begin * width_);
    }
    team_.reach(&Desk::offered, stage(chunk));
  }

  void reduce(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    const std::size_t begin = shards.begin(me_), base = chunk * per_chunk_;
    sources_.resize(team_.ranks.size());
    pieces_.visit(base + begin, base + shards.end(me_),
                  [&](const std::byte* input, std::byte* output, std::size_t count, std::size_t offset) {
                    const std::size_t at = (begin + offset) * width_;
                    for (std::size_t peer = 0; peer < sources_.size(); ++peer) {
                      sources_[peer] = peer == me_ ? input : slot_of(peer, chunk) + at;
                    }
                    const std::array<std::byte*, 2> destinations{output, slot_of(me_, chunk) + at};
                    kernels::reduce(op_, pieces_.dtype(), sources_, destinations, count, pre_, post_);
                  });
    team_.reach(&Desk::reduced, stage(chunk));
  }

  void copy_out(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    const std::size_t base = chunk * per_chunk_;
    for (std::size_t peer = 0; peer < team_.ranks.size(); ++peer) {
      if (peer == me_) continue;
      const std::size_t begin = shards.begin(peer);
      pieces_.copy_out(base + begin, base + shards.end(peer), slot_of(peer, chunk) + begin * width_);
    }
    team_.reach(&Desk::finished, stage(chunk));
  }

  static std::uint64_t stage(std::uint64_t chunk) { return kOfferStage + 1 + chunk; }

 private:
  Shards shards_at(std::uint64_t chunk) const {
    return shards_of(team_.size(), pieces_.dtype(), std::min(per_chunk_, pieces_.count() - chunk * per_chunk_));
  }
  std::byte* slot_of(std::size_t participant, std::uint64_t chunk) const {
    return team_.desks[participant]->slot(chunk, team_.chunk);
  }

  Team& team_;
  Pieces& pieces_;
  const ReduceOp op_;
  const double pre_, post_;
  const std::size_t width_, per_chunk_, me_;
  std::vector<const std::byte*> sources_;
};

// The slots may still be read by a slow peer of the operation that used them last.
Task slots_free(Team& team) {
  const std::uint64_t goal = team.last_staged;
  co_await until([&team, goal] {
    return std::all_of(team.last_staged_desks.begin(), team.last_staged_desks.end(),
                       [goal](Desk* desk) { return desk->finished.load(std::memory_order_acquire) >= goal; });
  });
}

Task staged(Team& team, Pieces& pieces, ReduceOp op, double pre, double post) {
  Staging staging(team, pieces, op, pre, post);
  const std::uint64_t chunks = staging.chunks();
  co_await slots_free(team);
  staging.copy_in(0);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) {
      if (chunk + 1 >= Desk::kSlots)
        co_await team.all_reached(&Desk::finished, Staging::stage(chunk + 1 - Desk::kSlots));
      staging.copy_in(chunk + 1);
    }
    co_await team.all_reached(&Desk::offered, Staging::stage(chunk));
    staging.reduce(chunk);
    co_await team.all_reached(&Desk::reduced, Staging::stage(chunk));
    staging.copy_out(chunk);
  }
  team.last_staged = team.stamp(Staging::stage(chunks - 1));
  team.last_staged_desks = team.desks;
  team.stages_used += Staging::stage(chunks - 1);
}

}  // namespace

Task allreduce_node(Team& team, Pieces& pieces, ReduceOp op, double pre, double post) {
  count_bytes(team, pieces.bytes());
  // Slots are the host's memory, so what lies on devices has come here in segments that all can map.
  const auto& device = team.compute->device();
  if (device || pieces.bytes() >= kLeastInPlace) {
    NodeMemory& memory = team.transport.node_memory();
    const Piece* tensor = pieces.in_place();
    team.desks[static_cast<std::size_t>(team.me)]->location =
        tensor ? memory.locate(tensor->input, pieces.bytes()) : Location{};
    team.reach(&Desk::offered, kOfferStage);
    co_await team.all_reached(&Desk::offered, kOfferStage);
    const bool all_shared =
        std::all_of(team.desks.begin(), team.desks.end(), [](Desk* desk) { return desk->location.segment != 0; });
    if (all_shared) {
      std::vector<std::byte*> tensors;
      for (std::size_t index = 0; index < team.desks.size(); ++index) {
        tensors.push_back(static_cast<int>(index) == team.me
                              ? tensor->output
                              : memory.map(team.ranks[index], team.desks[index]->location, device));
      }
      co_await in_place(team, pieces, tensors, op, pre, post);
      team.stages_used += kOfferStage;
      co_return;
    }
  }
  co_await staged(team, pieces, op, pre, post);
}

}  // namespace sordino
