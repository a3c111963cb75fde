// The collectives that move data without folding it, and reduce-scatter, by messages, or by NCCL where a team has it.
#include "collectives/operations.h"

namespace sordino {

namespace {
constexpr std::size_t kSegment = std::size_t{1} << 20;  // of a pipelined broadcast
}

// A binomial tree, cut into segments so that a rank passes one on while it receives the next.
Task broadcast(Team& team, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  if (team.channel) {
    if ((team.me + 1) % team.size() != root) team.count_sent((team.me + 1) % team.size(), bytes);
    co_await nccl::broadcast(*team.channel, root, input, output, bytes);
    co_return;
  }
  const int size = team.size(), place = (team.me - root + size) % size;  // place 0 is the root
  if (team.me == root && output != input) co_await team.compute->copy(output, input, bytes);
  const auto rank_at = [&](int other) { return (other + root) % size; };
  std::vector<int> children;
  int parent = -1;
  for (int distance = 1; distance < size; distance *= 2) {
    if (place < distance) {
      if (place + distance < size) children.push_back(rank_at(place + distance));
    } else if (place < 2 * distance) {
      parent = rank_at(place - distance);
    }
  }
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> sending;
  for (std::size_t at = 0; at < bytes; at += kSegment) {
    const std::span segment(output + at, std::min(kSegment, bytes - at));
    if (parent >= 0) {
      auto receiving = team.receive(parent, segment);
      co_await team.finished(*receiving, parent);
    }
    for (const int child : children) sending.emplace_back(child, team.send(child, segment));
  }
  for (auto& [child, transfer] : sending) co_await team.finished(*transfer, child);
}

// A ring: in step s everybody passes on the block it got in step s-1.
Task allgather(Team& team, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  if (team.channel) {
    for (int step = 0; step < team.size() - 1; ++step) {
      const int passed_on = (team.me + team.size() - step) % team.size();
      team.count_sent((team.me + 1) % team.size(), sizes[static_cast<std::size_t>(passed_on)]);
    }
    co_await nccl::allgather(*team.channel, input, std::move(sizes), output);
    co_return;
  }
  const int size = team.size();
  std::vector<std::size_t> starts(sizes.size() + 1, 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) starts[i + 1] = starts[i] + sizes[i];
  const auto block = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    return std::span(output + starts[wrapped], sizes[wrapped]);
  };
  co_await team.compute->copy(block(team.me).data(), input, block(team.me).size());
  for (int step = 0; step < size - 1; ++step) {
    co_await team.exchange((team.me + 1) % size, block(team.me - step), (team.me + size - 1) % size,
                           block(team.me - step - 1));
  }
}

Task alltoall(Team& team, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes) {
  if (team.channel) {
    for (int peer = 0; peer < team.size(); ++peer) {
      if (peer != team.me) team.count_sent(peer, send_sizes[static_cast<std::size_t>(peer)]);
    }
    co_await nccl::alltoall(*team.channel, input, std::move(send_sizes), output, std::move(receive_sizes));
    co_return;
  }
  const int size = team.size();
  const auto cut = [size](auto* data, const std::vector<std::size_t>& sizes) {
    std::vector<std::span<std::remove_pointer_t<decltype(data)>>> parts;
    for (int index = 0; index < size; ++index) {
      parts.emplace_back(data, sizes[static_cast<std::size_t>(index)]);
      data += sizes[static_cast<std::size_t>(index)];
    }
    return parts;
  };
  const auto out = cut(input, send_sizes);
  const auto in = cut(output, receive_sizes);
  co_await team.compute->copy(in[team.me].data(), out[team.me].data(), out[team.me].size());
  for (int step = 1; step < size; ++step) {
    const int to = (team.me + step) % size, from = (team.me + size - step) % size;
    co_await team.exchange(to, out[to], from, in[from]);
  }
}

// Everybody sends everybody its part; each folds what it got once, in rank order, at full precision.
Task reducescatter(Team& team, DType dtype, const std::byte* input, std::vector<std::size_t> bounds, std::byte* output,
                   ReduceOp op, double pre, double post) {
  if (team.channel) {
    for (std::size_t peer = 0; peer + 1 < bounds.size(); ++peer) {
      if (static_cast<int>(peer) == team.me) continue;
      team.count_sent(static_cast<int>(peer), (bounds[peer + 1] - bounds[peer]) * size_of(dtype));
    }
    co_await nccl::reducescatter(*team.channel, dtype, input, std::move(bounds), output, op, pre, post);
    co_return;
  }
  const std::size_t width = size_of(dtype), parts = static_cast<std::size_t>(team.size()),
                    me = static_cast<std::size_t>(team.me);
  const auto size_at = [&](std::size_t index) { return (bounds[index + 1] - bounds[index]) * width; };
  std::vector<std::size_t> send_sizes, receive_sizes(parts, size_at(me));
  for (std::size_t index = 0; index < parts; ++index) send_sizes.push_back(size_at(index));
  const auto arrived = team.compute->scratch(parts * size_at(me));
  co_await team.compute->idle();
  co_await alltoall(team, input, send_sizes, arrived.get(), receive_sizes);
  std::vector<const std::byte*> sources;
  for (std::size_t index = 0; index < parts; ++index) sources.push_back(arrived.get() + index * size_at(me));
  std::byte* destinations[] = {output};
  co_await team.compute->reduce(op, dtype, sources, destinations, bounds[me + 1] - bounds[me], pre, post);
}

}  // namespace sordino
