// All-to-all: each rank gets a part of each rank's values, through shared memory, by messages between pairs, or by
// NCCL.
#include <algorithm>
#include <deque>
#include <utility>

#include "collectives/collective.h"
#include "collectives/node_pipeline.h"
#include "collectives/operations.h"

namespace sordino {
namespace {

using NodeMatrix = std::vector<std::vector<std::size_t>>;  // by giver, by taker: bytes

Task alltoall_in_node(Participants& participants, const std::byte* input, const NodeMatrix& matrix, std::byte* output) {
  const auto me = static_cast<std::size_t>(participants.me);
  NodeMove move{.input = input, .parts = {}};
  for (const std::vector<std::size_t>& sizes : matrix) {
    std::vector<NodeMove::Part>& parts = move.parts.emplace_back();
    for (std::size_t begin = 0; const std::size_t bytes : sizes)
      parts.push_back({std::exchange(begin, begin + bytes), bytes});
    move.places.push_back(output);
    output += sizes[me];
  }
  co_await move_in_node(participants, std::move(move));
}

}  // namespace

Task alltoall(Participants& participants, const std::byte* input, std::vector<std::size_t> send_sizes,
              std::byte* output, std::vector<std::size_t> receive_sizes) {
  if (participants.channel) {
    for (int peer = 0; peer < participants.size(); ++peer) {
      if (peer != participants.me) participants.count_sent(peer, send_sizes[static_cast<std::size_t>(peer)]);
    }
    co_await nccl::alltoall(*participants.channel, input, std::move(send_sizes), output, std::move(receive_sizes));
    co_return;
  }
  const int size = participants.size();
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
  co_await participants.compute->copy(in[participants.me].data(), out[participants.me].data(),
                                      out[participants.me].size());
  // Several steps at a time, so that links are busy in both directions even while ranks of a node exchange.
  constexpr std::size_t kTransfers = 16;
  std::deque<std::pair<int, std::unique_ptr<Transfer>>> pending;
  for (int step = 1; step < size; ++step) {
    const int to = (participants.me + step) % size, from = (participants.me + size - step) % size;
    pending.emplace_back(from, participants.receive(from, in[from]));
    pending.emplace_back(to, participants.send(to, out[to]));
    for (; pending.size() > kTransfers; pending.pop_front())
      co_await participants.finished(*pending.front().second, pending.front().first);
  }
  for (auto& [peer, transfer] : pending) co_await participants.finished(*transfer, peer);
}

namespace nccl {

Task alltoall(Channel& channel, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  {
    Group group(communicator);
    for (int peer = 0; peer < communicator.size(); ++peer) {
      const std::size_t out = send_sizes[static_cast<std::size_t>(peer)];
      const std::size_t in = receive_sizes[static_cast<std::size_t>(peer)];
      if (peer == communicator.rank()) {
        if (in > 0) channel.device().copy(output, input, in, channel.stream());
      } else {
        communicator.send(input, out, peer, channel.stream());
        communicator.receive(output, in, peer, channel.stream());
      }
      input += out;
      output += in;
    }
    group.end();
  }
  co_await channel.ready();
}

}  // namespace nccl

namespace collectives {
namespace {

std::string complaint(const Announcement& said, std::size_t members) {
  if (said.splits.size() == members) return "";
  return "has splits for " + std::to_string(said.splits.size()) + " of " + std::to_string(members) + " ranks";
}

void merge(const Announced& announced, Merged& merged) {
  for (const Announcement* said : announced.all)
    merged.rows.insert(merged.rows.end(), said->splits.begin(), said->splits.end());
}

bool fits(const Request& request, const Merged& merged, std::size_t parts, std::size_t me) {
  return merged.rows.size() == parts * parts && rows_fit(request.tensors[0], merged.rows) &&
         std::equal(request.splits.begin(), request.splits.end(), merged.rows.begin() + me * parts);
}

Task run(Operation& operation) {
  Participants& participants = *operation.participants;
  const Submission& submission = operation.submissions.front();
  const Tensor& tensor = submission.request.tensors.front();
  const auto parts = static_cast<std::size_t>(participants.size()), me = static_cast<std::size_t>(participants.me);
  const auto& matrix = operation.decision.merged.rows;  // row i: rows that participant i sends to each participant
  std::vector<std::size_t> send_sizes, receive_sizes;
  std::int64_t rows = 0;
  for (std::size_t peer = 0; peer < parts; ++peer) {
    const std::int64_t received = matrix[peer * parts + me];
    rows += received;
    submission.handle->rows.push_back(received);
    send_sizes.push_back(static_cast<std::size_t>(matrix[me * parts + peer]) * tensor.row_bytes());
    receive_sizes.push_back(static_cast<std::size_t>(received) * tensor.row_bytes());
  }
  std::vector<std::int64_t> shape = tensor.shape;
  shape[0] = rows;
  std::byte* output = result_memory(*submission.handle, operation, tensor, std::move(shape),
                                    static_cast<std::size_t>(rows) * tensor.row_bytes());
  co_await participants.compute->idle();
  if (moves_in_node(participants, true)) {
    NodeMatrix sizes(parts);
    for (std::size_t index = 0; index < matrix.size(); ++index)
      sizes[index / parts].push_back(static_cast<std::size_t>(matrix[index]) * tensor.row_bytes());
    co_await alltoall_in_node(participants, tensor.input, sizes, output);
  } else {
    co_await alltoall(participants, tensor.input, std::move(send_sizes), output, std::move(receive_sizes));
  }
}

Recipe recipe(const Request& request, const Merged& merged, const std::vector<int>& ranks, std::size_t me) {
  const Tensor& tensor = request.tensors[0];
  const std::size_t parts = ranks.size(), row = tensor.row_bytes();
  Recipe made;
  made.me = me;
  made.shape = tensor.shape;
  made.shape[0] = 0;
  for (std::size_t member = 0; member < parts; ++member) {
    const auto* rows = merged.rows.data() + member * parts;
    std::size_t before = 0, all = 0;
    for (std::size_t to = 0; to < parts; ++to) {
      if (to < me) before += static_cast<std::size_t>(rows[to]) * row;
      all += static_cast<std::size_t>(rows[to]) * row;
      if (member == me) made.gives.push_back(static_cast<std::size_t>(rows[to]) * row);
    }
    made.takes.push_back({before, static_cast<std::size_t>(rows[me]) * row});
    made.rows.push_back(rows[me]);
    made.shape[0] += rows[me];
    made.most = std::max(made.most, all);
    if (member == me) made.published = all;
  }
  return made;
}

bool valid(const Signature& what, std::span<const int> ranks) {
  if (what.shape.empty() || what.splits.size() != ranks.size()) return false;
  std::int64_t rest = what.shape[0];
  return std::all_of(what.splits.begin(), what.splits.end(),
                     [&](std::int64_t rows) { return rows >= 0 && (rest -= rows) >= 0; });
}

}  // namespace

const Collective kAlltoall{
    .name = "alltoall",
    .rows_may_differ = true,
    .repeats = true,
    .complaint = complaint,
    .merge = merge,
    .fits = fits,
    .recipe = recipe,
    .valid = valid,
    .run = run,
};

}  // namespace collectives
}  // namespace sordino
