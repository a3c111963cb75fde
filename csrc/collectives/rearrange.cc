// The collectives that move data without folding it, and reduce-scatter, by messages.
#include "collectives/operations.h"

namespace sordino {

namespace {
constexpr std::size_t kSegment = std::size_t{1} << 20;  // of a pipelined broadcast
}

// A binomial tree, cut into segments so that a rank passes one on while it receives the next.
Task broadcast(Team& team, int root, const std::byte* input, std::byte* output, std::size_t bytes) {
  const int size = team.size(), place = (team.me - root + size) % size;  // place 0 is the root
  if (team.me == root && output != input && bytes > 0) std::memcpy(output, input, bytes);
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
  const int size = team.size();
  std::vector<std::size_t> starts(sizes.size() + 1, 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) starts[i + 1] = starts[i] + sizes[i];
  const auto block = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    return std::span(output + starts[wrapped], sizes[wrapped]);
  };
  if (!block(team.me).empty()) std::memcpy(block(team.me).data(), input, block(team.me).size());
  for (int step = 0; step < size - 1; ++step) {
    co_await team.exchange((team.me + 1) % size, block(team.me - step), (team.me + size - 1) % size,
                           block(team.me - step - 1));
  }
}

Task alltoall(Team& team, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes) {
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
  if (!out[team.me].empty()) std::memcpy(in[team.me].data(), out[team.me].data(), out[team.me].size());
  for (int step = 1; step < size; ++step) {
    const int to = (team.me + step) % size, from = (team.me + size - step) % size;
    co_await team.exchange(to, out[to], from, in[from]);
  }
}

// Everybody sends everybody its part; each folds what it got once, in rank order, at full precision.
Task reducescatter(Team& team, DType dtype, const std::byte* input, std::vector<std::size_t> bounds, std::byte* output,
                   ReduceOp op, double pre, double post) {
  const std::size_t width = size_of(dtype), parts = static_cast<std::size_t>(team.size()),
                    me = static_cast<std::size_t>(team.me);
  const auto size_at = [&](std::size_t index) { return (bounds[index + 1] - bounds[index]) * width; };
  std::vector<std::size_t> send_sizes, receive_sizes(parts, size_at(me));
  for (std::size_t index = 0; index < parts; ++index) send_sizes.push_back(size_at(index));
  std::vector<std::byte> arrived(parts * size_at(me));
  co_await alltoall(team, input, send_sizes, arrived.data(), receive_sizes);
  std::vector<const std::byte*> sources;
  for (std::size_t index = 0; index < parts; ++index) sources.push_back(arrived.data() + index * size_at(me));
  std::byte* destinations[] = {output};
  kernels::reduce(op, dtype, sources, destinations, bounds[me + 1] - bounds[me], pre, post);
}

}  // namespace sordino
