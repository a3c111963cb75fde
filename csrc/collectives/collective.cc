#include "collectives/collective.h"

#include <algorithm>

namespace sordino {

const Collective& collective(Opcode opcode) {
  static constexpr const Collective* kTable[] = {
      // in the order of Opcode
      &collectives::kAllreduce,     &collectives::kBroadcast, &collectives::kAllgather, &collectives::kAlltoall,
      &collectives::kReducescatter, &collectives::kBarrier,   &collectives::kJoin,      &collectives::kAddSet,
      &collectives::kRemoveSet,     &collectives::kExchange,
  };
  static_assert(std::size(kTable) == static_cast<std::size_t>(kLastOpcode) + 1);
  return *kTable[static_cast<std::size_t>(opcode)];
}

Result host_result(std::vector<std::int64_t> shape, std::size_t bytes) {
  return {host_compute().scratch(bytes), nullptr, nullptr, bytes, std::move(shape)};
}

Result& new_result(Handle& handle, const Operation& operation, std::vector<std::int64_t> shape, std::size_t bytes) {
  const auto& device = operation.participants->compute->device();
  if (!device) return handle.results.emplace_back(host_result(std::move(shape), bytes));
  Result& result = handle.results.emplace_back();
  const OwnedQueue& queue = operation.queue;
  result.device = device;
  result.reader = std::make_shared<Stream>(*queue);
  // The result may outlive the process set, or the world, whose queue this is.
  result.data = {device->take(std::max<std::size_t>(bytes, 1), *queue),
                 [device, queue, reader = result.reader](std::byte* data) { device->give_back(data, *reader); }};
  result.bytes = bytes;
  result.shape = std::move(shape);
  return result;
}

std::byte* result_memory(Handle& handle, const Operation& operation, const Tensor& tensor,
                         std::vector<std::int64_t> shape, std::size_t bytes) {
  // Results without bytes may differ in shape, so their memory does not tell whether it fits.
  if (tensor.output && bytes > 0 && tensor.output_bytes == bytes) return tensor.output;
  return new_result(handle, operation, std::move(shape), bytes).data.get();
}

bool rows_fit(const Tensor& tensor, std::span<const std::int64_t> rows) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  const auto most = kMost / rows.size() / std::max<std::size_t>(tensor.row_bytes(), 1);
  return std::all_of(rows.begin(), rows.end(),
                     [&](std::int64_t count) { return static_cast<std::uint64_t>(count) <= most; });
}

Task move_nothing(Operation&) { co_return; }

Task come_after(Operation& operation, const Request& request) {
  if (!request.after) co_return;
  operation.dormant = true;
  co_await until([&request] { return request.after->done(); });
  operation.dormant = false;
  if (request.after->error) std::rethrow_exception(request.after->error);
}

}  // namespace sordino
