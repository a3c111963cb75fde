// The data phase of each collective. The negotiation has settled that all participants run it now, with the same
// arguments, so these functions do not check that again.
#pragma once

#include <vector>

#include "base/dtype.h"
#include "collectives/exchange.h"
#include "collectives/nccl_operations.h"
#include "collectives/participants.h"
#include "collectives/pieces.h"
#include "collectives/sites.h"

namespace sordino {

// All-reduce of tensors of one dtype as if they were one: output[i] = post * fold(op, pre * input[i] of every rank).
// Goes through shared memory within a node (allreduce_node.cc), by messages (allreduce_messages.cc), or both
// (allreduce_nodes.cc).
Task allreduce(Participants& participants, Pieces pieces, ReduceOp op, double pre, double post);
Task allreduce_node(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post);
Task allreduce_nodes(Participants& participants, const Sites& sites, Pieces& pieces, ReduceOp op, double pre,
                     double post);
Task allreduce_messages(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post);
// Adasum (Maleki et al. 2020): pairwise along a binary tree of ranks, with dot products of each tensor.
Task adasum(Participants& participants, Pieces& pieces, double pre, double post);

// Copies input of participant `root` to every participant's output.
Task broadcast(Participants& participants, int root, const std::byte* input, std::byte* output, std::size_t bytes);

// Concatenates blocks of `sizes[i]` bytes of every participant i; `output` has room for all of them.
Task allgather(Participants& participants, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output);

// Sends send_sizes[i] bytes to participant i and receives receive_sizes[i] from it, both in order of i.
Task alltoall(Participants& participants, const std::byte* input, std::vector<std::size_t> send_sizes,
              std::byte* output, std::vector<std::size_t> receive_sizes);

// Folds the participants' inputs; participant i gets elements [bounds[i], bounds[i + 1]).
Task reducescatter(Participants& participants, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post);

// Gossip: each segment becomes an average over some participants (exchange.h), as the topology says for the round.
Task exchange(Participants& participants, const Exchange& what, std::uint64_t round);
// As exchange(), by NCCL. Is over once all its work is on the device's queue. The channel's ranks are the participants.
Task exchange_by_nccl(Participants& participants, const Exchange& what, std::uint64_t round, nccl::Channel& channel);

}  // namespace sordino
