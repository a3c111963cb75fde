// All-reduce among the ranks of one node through shared memory. Each rank owns a shard. It alone reads that shard from
// all ranks, folds it in rank order, and hands the result to all ranks, so all ranks get the same bits.
//
// Tensors in shared segments are folded in place, in one pass: the owner reads its shard in all arenas and writes all
// arenas. Other tensors pass through slots of the ranks, in chunks small enough to stay in cache:
//
//   copy in    my input of the chunk, except my own shard  -> my slot          offered  = stage(chunk)
//   reduce     my shard: my input and the peers' slots     -> output, my slot  reduced  = stage(chunk)
//   copy out   the peers' shards from their slots          -> output           finished = stage(chunk)
//
// A rank never waits for a free slot of its own: it copies chunk k + 1 in once all ranks have reduced chunk k - 1, and
// so have copied out all chunks up to k - 2. Its slot held chunk k + 1 - kSlots, which is one of them.
#include <array>

#include "collectives/operations.h"
#include "collectives/shards.h"
#include "collectives/shared_tensors.h"

namespace sordino {
namespace {

static_assert(SharedBlock::kSlots >= 3, "with fewer a slot may hold what a peer has not copied out yet");

constexpr std::uint64_t kReducedStage = kOfferStage + 1;

Task in_place(Participants& participants, Pieces& pieces, const std::vector<std::byte*>& tensors, ReduceOp op,
              double pre, double post) {
  const Shards shards = shards_of(participants.size(), pieces.dtype(), pieces.count());
  const auto me = static_cast<std::size_t>(participants.me);
  const std::size_t offset = shards.begin(me) * size_of(pieces.dtype());
  std::vector<const std::byte*> sources;
  std::vector<std::byte*> destinations;
  for (std::byte* tensor : tensors) {
    sources.push_back(tensor + offset);
    destinations.push_back(tensor + offset);
  }
  participants.meet_inputs(kOfferStage);
  co_await participants.compute->reduce(op, pieces.dtype(), sources, destinations, shards.end(me) - shards.begin(me),
                                        pre, post);
  co_await participants.meet(&SharedBlock::reduced, kReducedStage);
  participants.stages_used += kReducedStage;
}

// Moves chunks of some pieces through the slots.
class SlotPipeline {
 public:
  SlotPipeline(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post)
      : participants_(participants),
        pieces_(pieces),
        op_(op),
        pre_(pre),
        post_(post),
        width_(size_of(pieces.dtype())),
        per_chunk_(participants.slot_bytes / width_),
        me_(static_cast<std::size_t>(participants.me)),
        slots_(participants, std::min(pieces.bytes(), participants.slot_bytes)) {}

  std::uint64_t chunks() const { return (pieces_.count() + per_chunk_ - 1) / per_chunk_; }
  void take_slots() { slots_.take(participants_, chunks()); }

  void copy_in(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    std::byte* slot = slots_.at(me_, chunk);
    for (const auto& [begin, end] :
         {std::pair{std::size_t{0}, shards.begin(me_)}, std::pair{shards.end(me_), shards.count}}) {
      pieces_.copy_in(chunk * per_chunk_ + begin, chunk * per_chunk_ + end, slot + begin * width_);
    }
    participants_.reach(&SharedBlock::offered, stage(chunk));
  }

  void reduce(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    const std::size_t begin = shards.begin(me_), base = chunk * per_chunk_;
    sources_.resize(participants_.ranks.size());
    pieces_.visit(base + begin, base + shards.end(me_),
                  [&](const std::byte* input, std::byte* output, std::size_t count, std::size_t offset) {
                    const std::size_t at = (begin + offset) * width_;
                    for (std::size_t peer = 0; peer < sources_.size(); ++peer) {
                      sources_[peer] = peer == me_ ? input : slots_.at(peer, chunk) + at;
                    }
                    const std::array<std::byte*, 2> destinations{output, slots_.at(me_, chunk) + at};
                    kernels::reduce(op_, pieces_.dtype(), sources_, destinations, count, pre_, post_,
                                    kernels::Others::kPublished);
                  });
    participants_.reach(&SharedBlock::reduced, stage(chunk));
  }

  void copy_out(std::uint64_t chunk) {
    const Shards shards = shards_at(chunk);
    const std::size_t base = chunk * per_chunk_;
    for (std::size_t peer = 0; peer < participants_.ranks.size(); ++peer) {
      if (peer == me_) continue;
      const std::size_t begin = shards.begin(peer);
      pieces_.copy_out(base + begin, base + shards.end(peer), slots_.at(peer, chunk) + begin * width_);
    }
    participants_.reach(&SharedBlock::finished, stage(chunk));
  }

  static std::uint64_t stage(std::uint64_t chunk) { return kOfferStage + 1 + chunk; }

 private:
  Shards shards_at(std::uint64_t chunk) const {
    return shards_of(participants_.size(), pieces_.dtype(), std::min(per_chunk_, pieces_.count() - chunk * per_chunk_));
  }

  Participants& participants_;
  Pieces& pieces_;
  const ReduceOp op_;
  const double pre_, post_;
  const std::size_t width_, per_chunk_, me_;
  Slots slots_;
  std::vector<const std::byte*> sources_;
};

Task through_slots(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post) {
  participants.used_slots = true;
  SlotPipeline pipeline(participants, pieces, op, pre, post);
  const std::uint64_t chunks = pipeline.chunks();
  co_await slots_free(participants);
  pipeline.take_slots();
  pipeline.copy_in(0);
  for (std::uint64_t chunk = 0; chunk < chunks; ++chunk) {
    if (chunk + 1 < chunks) pipeline.copy_in(chunk + 1);
    co_await participants.all_reached(&SharedBlock::offered, SlotPipeline::stage(chunk));
    pipeline.reduce(chunk);
    co_await participants.all_reached(&SharedBlock::reduced, SlotPipeline::stage(chunk));
    pipeline.copy_out(chunk);
  }
  slots_used(participants, SlotPipeline::stage(chunks - 1));
  participants.stages_used += SlotPipeline::stage(chunks - 1);
}

}  // namespace

Task allreduce_node(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post) {
  participants.traffic.count_all_reduce(pieces.bytes(), participants.ranks.size(),
                                        static_cast<std::size_t>(participants.me),
                                        [&](std::size_t place) { return participants.ranks[place]; });
  // Slots are host memory. Device memory comes here only in segments that all ranks can map.
  if (participants.compute->device() || pieces.bytes() >= kLeastInPlace) {
    std::vector<std::byte*> tensors;
    co_await find_shared(participants, pieces, tensors);
    if (!tensors.empty()) {
      participants.direct = true;
      co_await in_place(participants, pieces, tensors, op, pre, post);
      co_return;
    }
  }
  co_await through_slots(participants, pieces, op, pre, post);
}

}  // namespace sordino
