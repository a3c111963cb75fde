// Reduce-scatter: everybody gets a part of the values that all fold, by messages between pairs, or by NCCL.
#include <algorithm>

#include "collectives/nccl_scaling.h"
#include "collectives/operations.h"

namespace sordino {

// Everybody sends everybody its part; each folds what it got once, in rank order, at full precision.
Task reducescatter(Participants& participants, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post) {
  if (participants.channel) {
    for (std::size_t peer = 0; peer + 1 < bounds.size(); ++peer) {
      if (static_cast<int>(peer) == participants.me) continue;
      participants.count_sent(static_cast<int>(peer), (bounds[peer + 1] - bounds[peer]) * size_of(dtype));
    }
    co_await nccl::reducescatter(*participants.channel, dtype, input, std::move(bounds), output, op, pre, post);
    co_return;
  }
  const std::size_t width = size_of(dtype), parts = static_cast<std::size_t>(participants.size()),
                    me = static_cast<std::size_t>(participants.me);
  const auto size_at = [&](std::size_t index) { return (bounds[index + 1] - bounds[index]) * width; };
  std::vector<std::size_t> send_sizes, receive_sizes(parts, size_at(me));
  for (std::size_t index = 0; index < parts; ++index) send_sizes.push_back(size_at(index));
  const auto arrived = participants.compute->scratch(parts * size_at(me));
  co_await participants.compute->idle();
  co_await alltoall(participants, input, send_sizes, arrived.get(), receive_sizes);
  std::vector<const std::byte*> sources;
  for (std::size_t index = 0; index < parts; ++index) sources.push_back(arrived.get() + index * size_at(me));
  std::byte* destinations[] = {output};
  co_await participants.compute->reduce(op, dtype, sources, destinations, bounds[me + 1] - bounds[me], pre, post);
}

namespace nccl {

Task reducescatter(Channel& channel, DType dtype, const std::byte* input, std::vector<std::size_t> bounds,
                   std::byte* output, ReduceOp op, double pre, double post) {
  Communicator& communicator = channel.communicator();
  const Folding how(dtype, op, pre, post, communicator.size());
  const std::size_t width = size_of(dtype);
  std::vector<std::size_t> counts;
  for (std::size_t part = 0; part + 1 < bounds.size(); ++part) counts.push_back(bounds[part + 1] - bounds[part]);
  if (bounds.back() == 0) co_return;
  co_await channel.ready();
  if (how.pre != 1) {
    std::byte* scaled = channel.scratch(bounds.back() * width);
    scale(channel, dtype, input, scaled, bounds.back(), how.pre);
    input = scaled;
  }
  if (std::equal(counts.begin() + 1, counts.end(), counts.begin())) {
    communicator.reduce_scatter(input, output, counts[0], dtype, how.op, channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const auto part = static_cast<std::size_t>(root);
      communicator.reduce(input + bounds[part] * width, root == communicator.rank() ? output : nullptr, counts[part],
                          dtype, how.op, root, channel.stream());
    }
    group.end();
  }
  co_await channel.ready();
  const std::size_t mine = counts[static_cast<std::size_t>(communicator.rank())];
  if (how.post != 1 && mine > 0) scale(channel, dtype, output, output, mine, how.post);
}

}  // namespace nccl
}  // namespace sordino
