// The data phase of collectives by NCCL, on device memory. As in operations.h, nothing that was negotiated is checked
// again. Each is over once all its work is on the device's queue: the caller records an event there, and waits for it.
#pragma once

#include <vector>

#include "collectives/nccl_channel.h"
#include "collectives/pieces.h"
#include "progress/task.h"

namespace sordino::nccl {

// Arguments are those of operations.h. Participants are the communicator's ranks. Reductions need supports(type, op) to
// hold. An average is a sum with a `post` of 1 / ranks. Without other scaling it uses NCCL's own average, which divides
// before it adds. Several pieces travel as one, through scratch memory. More than `most` bytes take several calls.
inline constexpr std::size_t kMostAtOnce = std::size_t{256} << 20;
Task allreduce(Channel& channel, Pieces pieces, ReduceOp op, double pre, double post, std::size_t most = kMostAtOnce);
Task broadcast(Channel& channel, int root, const std::byte* input, std::byte* output, std::size_t bytes);
Task allgather(Channel& channel, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output);
Task alltoall(Channel& channel, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes);
Task reducescatter(Channel& channel, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post);

}  // namespace sordino::nccl
