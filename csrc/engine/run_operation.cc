// From a decision to its data phase: which operation, on which memory, with results where the handle shows them.
#include <numeric>

#include "collectives/operations.h"
#include "engine/running.h"

namespace sordino {
namespace {

// In the memory that the operation computes on.
Result& new_result(Handle& handle, const Running& running, std::vector<std::int64_t> shape, std::size_t bytes) {
  Result& result = handle.results.emplace_back();
  const Participants& participants = *running.participants;
  result.device = participants.compute->device();
  if (const auto& device = result.device) {
    const Stream queue = running.queue;
    result.reader = std::make_shared<Stream>(queue);
    result.data = {device->take(std::max<std::size_t>(bytes, 1), queue),
                   [device, reader = result.reader](std::byte* data) { device->give_back(data, *reader); }};
  } else {
    result.data = participants.compute->scratch(bytes);
  }
  result.bytes = bytes;
  result.shape = std::move(shape);
  return result;
}

// Joined members contribute zeros. Sums need nothing for that; minimum, maximum and product do.
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

Task run_allreduce(Running& running) {
  Participants& participants = *running.participants;
  const Request& first = running.first();
  const auto [op, post] = folding_of(first.op, first.postscale, participants.set_size);
  const bool zeros_count = participants.size() < participants.set_size &&
                           (op == ReduceOp::kMin || op == ReduceOp::kMax || op == ReduceOp::kProduct);
  for (int code = 0; code < kDTypeCount; ++code) {
    const auto dtype = static_cast<DType>(code);
    // Adasum weighs every tensor by itself, so tensors that lie side by side stay apart.
    Pieces pieces(dtype, op == ReduceOp::kAdasum ? Neighbours::kKeepApart : Neighbours::kMerge);
    for (const Submission& submission : running.submissions) {
      for (const Tensor& tensor : submission.request.tensors) {
        if (tensor.dtype == dtype) pieces.add(tensor.input, tensor.output, tensor.count());
      }
    }
    co_await allreduce(participants, pieces, op, first.prescale, zeros_count ? 1 : post);
    if (zeros_count) fold_zero(pieces, op, post);
  }
}

Task run_allgather(Running& running) {
  Participants& participants = *running.participants;
  const Submission& submission = running.submissions.front();
  const auto parts = static_cast<std::size_t>(participants.size());
  for (std::size_t index = 0; index < submission.request.tensors.size(); ++index) {
    const Tensor& tensor = submission.request.tensors[index];
    const std::span rows(running.decision.numbers.data() + index * parts, parts);
    std::vector<std::size_t> sizes;
    for (const std::int64_t count : rows) sizes.push_back(static_cast<std::size_t>(count) * tensor.row_bytes());
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
    const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    std::byte* output = new_result(*submission.handle, running, std::move(shape), total).data.get();
    co_await participants.compute->idle();
    co_await allgather(participants, tensor.input, std::move(sizes), output);
    submission.handle->numbers.insert(submission.handle->numbers.end(), rows.begin(), rows.end());
  }
}

Task run_alltoall(Running& running) {
  Participants& participants = *running.participants;
  const Submission& submission = running.submissions.front();
  const Tensor& tensor = submission.request.tensors.front();
  const auto parts = static_cast<std::size_t>(participants.size()), me = static_cast<std::size_t>(participants.me);
  const auto& matrix = running.decision.numbers;  // row i: what participant i sends to each
  std::vector<std::size_t> send_sizes, receive_sizes;
  std::int64_t rows = 0;
  for (std::size_t peer = 0; peer < parts; ++peer) {
    const std::int64_t received = matrix[peer * parts + me];
    rows += received;
    submission.handle->numbers.push_back(received);
    send_sizes.push_back(static_cast<std::size_t>(matrix[me * parts + peer]) * tensor.row_bytes());
    receive_sizes.push_back(static_cast<std::size_t>(received) * tensor.row_bytes());
  }
  std::vector<std::int64_t> shape = tensor.shape;
  shape[0] = rows;
  std::byte* output =
      new_result(*submission.handle, running, std::move(shape), static_cast<std::size_t>(rows) * tensor.row_bytes())
          .data.get();
  co_await participants.compute->idle();
  co_await alltoall(participants, tensor.input, std::move(send_sizes), output, std::move(receive_sizes));
}

Task run_reducescatter(Running& running) {
  Participants& participants = *running.participants;
  const Submission& submission = running.submissions.front();
  const Request& request = submission.request;
  const auto parts = static_cast<std::int64_t>(participants.size());
  for (const Tensor& tensor : request.tensors) {
    const std::int64_t rows = tensor.shape[0];
    const std::size_t row = tensor.row_bytes() / size_of(tensor.dtype);
    // The first rows % parts members get one row more, as in Horovod.
    std::vector<std::size_t> bounds;
    for (std::int64_t index = 0; index <= parts; ++index) {
      bounds.push_back(static_cast<std::size_t>(index * (rows / parts) + std::min(index, rows % parts)) * row);
    }
    std::vector<std::int64_t> shape = tensor.shape;
    shape[0] = rows / parts + (participants.me < rows % parts ? 1 : 0);
    const std::size_t bytes = static_cast<std::size_t>(shape[0]) * tensor.row_bytes();
    std::byte* output = new_result(*submission.handle, running, std::move(shape), bytes).data.get();
    const auto [op, post] = folding_of(request.op, request.postscale, participants.set_size);
    co_await participants.compute->idle();
    co_await reducescatter(participants, tensor.dtype, tensor.input, std::move(bounds), output, op, request.prescale,
                           post);
  }
}

Task run_broadcast(Running& running) {
  Participants& participants = *running.participants;
  const Request& request = running.first();
  const auto root =
      std::find(participants.ranks.begin(), participants.ranks.end(), request.root) - participants.ranks.begin();
  for (const Tensor& tensor : request.tensors) {
    co_await broadcast(participants, static_cast<int>(root), tensor.input, tensor.output, tensor.bytes());
  }
}

// Which begins when what it comes after is over.
Task run_exchange(Running& running) {
  const Request& request = running.first();
  co_await come_after(running, request);
  co_await exchange(*running.participants, *request.exchange, request.round);
}

// Nothing to move: that all have agreed is the operation, and the numbers are its result.
Task run_agreement(Running& running) {
  for (const Submission& submission : running.submissions) submission.handle->numbers = running.decision.numbers;
  co_return;
}

}  // namespace

Task come_after(Running& running, const Request& request) {
  if (!request.after) co_return;
  running.dormant = true;
  co_await until([&request] { return request.after->done(); });
  running.dormant = false;
  if (request.after->error) std::rethrow_exception(request.after->error);
}

Task run_in_place(Running& running) {
  switch (running.first().opcode) {
    case Opcode::kAllreduce: return run_allreduce(running);
    case Opcode::kBroadcast: return run_broadcast(running);
    case Opcode::kAllgather: return run_allgather(running);
    case Opcode::kAlltoall: return run_alltoall(running);
    case Opcode::kReducescatter: return run_reducescatter(running);
    case Opcode::kExchange: return run_exchange(running);
    default: return run_agreement(running);
  }
}

Task run_operation(Running& running) { return running.first().device ? run_on_device(running) : run_in_place(running); }

}  // namespace sordino
