// All-reduce: each rank gets the fold of all ranks' values. The algorithm depends on the memory that they share.
#include "collectives/collective.h"
#include "collectives/nccl_operations.h"
#include "collectives/operations.h"
#include "collectives/sites.h"

namespace sordino {

Task allreduce(Participants& participants, Pieces pieces, ReduceOp op, double pre, double post) {
  if (pieces.count() == 0) co_return;
  if (participants.channel) {
    // Counted as in a ring: NCCL does not say how it moves the data.
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

namespace collectives {
namespace {

// Joined members contribute zeros. A sum stays the same; minimum, maximum and product must include a zero.
void fold_zero(const Pieces& pieces, ReduceOp op, double post) {
  constexpr std::size_t kBlock = 4096;
  const std::size_t width = size_of(pieces.dtype());
  const std::vector<std::byte> zeros(kBlock * width);
  for (const Piece& piece : pieces.all()) {
    for (std::size_t at = 0; at < piece.count; at += kBlock) {
      const std::byte* sources[] = {piece.output + at * width, zeros.data()};
      std::byte* destinations[] = {piece.output + at * width};
      kernels::reduce(op, pieces.dtype(), sources, destinations, std::min(kBlock, piece.count - at), 1, post);
    }
  }
}

Task run(Operation& operation) {
  Participants& participants = *operation.participants;
  const Request& first = operation.first();
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto dtype = static_cast<DType>(code);
    const auto [op, post] = folding_of(first.op, dtype, first.postscale, participants.set_size);
    const bool zeros_count = participants.size() < participants.set_size &&
                             (op == ReduceOp::kMin || op == ReduceOp::kMax || op == ReduceOp::kProduct);
    // Adasum weighs each tensor separately, so adjacent tensors stay separate.
    Pieces pieces(dtype, op == ReduceOp::kAdasum ? Neighbors::kKeepApart : Neighbors::kMerge);
    for (const Submission& submission : operation.submissions) {
      for (const Tensor& tensor : submission.request.tensors) {
        if (tensor.dtype == dtype) pieces.add(tensor.input, tensor.output, tensor.count());
      }
    }
    co_await allreduce(participants, pieces, op, first.prescale, zeros_count ? 1 : post);
    if (zeros_count) fold_zero(pieces, op, post);
  }
}

Recipe recipe(const Request& request, const Merged&, const std::vector<int>& ranks, std::size_t me) {
  const std::size_t bytes = request.tensors[0].bytes();
  return {true,  me,    {ranks.size(), {0, bytes}}, std::vector(ranks.size(), bytes),
          bytes, bytes, request.tensors[0].shape,   {}};
}

}  // namespace

const Collective kAllreduce{
    .name = "allreduce",
    .zeros_stand_in = true,
    .reduces = true,
    .maps_devices = true,
    .fuses = true,
    .repeats = true,
    .recipe = recipe,
    .run = run,
};

}  // namespace collectives
}  // namespace sordino
