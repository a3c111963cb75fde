// All-reduce: everybody gets the values that all fold. Which way depends on the memory that the participants share.
#include "collectives/nccl_operations.h"
#include "collectives/operations.h"
#include "collectives/sites.h"

namespace sordino {

Task allreduce(Participants& participants, Pieces pieces, ReduceOp op, double pre, double post) {
  if (pieces.count() == 0) co_return;
  if (participants.channel) {
    // As in a ring; how NCCL goes about it, it does not say.
    participants.count_sent((participants.me + 1) % participants.size(),
                            2 * (pieces.bytes() - pieces.bytes() / participants.ranks.size()));
    co_await nccl::allreduce(*participants.channel, pieces, op, pre, post);
    co_return;
  }
  if (participants.size() == 1) {
    for (const Piece& piece : pieces.all()) {
      co_await participants.compute->reduce(op == ReduceOp::kAdasum ? ReduceOp::kSum : op, pieces.dtype(),
                                            {&piece.input, 1}, {&piece.output, 1}, piece.count, pre, post);
    }
  } else if (op == ReduceOp::kAdasum) {
    co_await adasum(participants, pieces, pre, post);
  } else if (participants.one_node) {
    co_await allreduce_node(participants, pieces, op, pre, post);
  } else {
    divide_first(pieces.dtype(), op, pre, post);
    const Sites sites(participants);
    if (sites.some_share()) {
      co_await allreduce_nodes(participants, sites, pieces, op, pre, post);
    } else {
      co_await allreduce_messages(participants, pieces, op, pre, post);
    }
  }
}

}  // namespace sordino
