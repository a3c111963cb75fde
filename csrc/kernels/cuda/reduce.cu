#include "kernels/cuda/element_ops.h"
#include "kernels/cuda/launch.cuh"

namespace sordino::kernels::cuda {
namespace {

// Rows of the table: sources, then destinations.
template <class T>
void reduce_as(ReduceOp op, const Table& table, std::uint32_t sources, double pre, double post, cudaStream_t stream) {
  const auto lists = static_cast<std::uint32_t>(table.width);
  if constexpr (std::is_integral_v<T>) {
    if (pre != 1 || post != 1) {
      return run_elementwise("reduce", table, ReduceScaled<T>{lists, sources, op, pre, post}, stream);
    }
  }
  const Reduce<T> operation{lists, sources, op, static_cast<Stage<T>>(pre), static_cast<Stage<T>>(post)};
  run_elementwise("reduce", table, operation, stream);
}

}  // namespace

void CudaKernels::reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
                         Stream stream) {
  if (sources == 0) throw UsageError("kernels::cuda::reduce needs at least one source");
  if (op != ReduceOp::kSum && op != ReduceOp::kMin && op != ReduceOp::kMax && op != ReduceOp::kProduct) {
    throw UsageError("kernels::cuda::reduce cannot fold with operation " + std::to_string(static_cast<int>(op)));
  }
  check_width("reduce", rows, std::max(rows.width, sources));
  if (rows.width == sources) return;
  Table table = table_of(rows);
  const Current current(ordinal_);
  const auto queue = cuda_stream(stream);
  if (type == DType::kBool) {
    // Bytes that are 0 or 1: OR is their maximum and AND their minimum.
    type = DType::kUInt8;
    op = op == ReduceOp::kSum || op == ReduceOp::kMax ? ReduceOp::kMax : ReduceOp::kMin;
    pre = post = 1;
  }
  if (sources == 1 && pre == 1 && post == 1) {
    for (std::size_t& count : table.counts) count *= size_of(type);
    return run_elementwise("reduce", table, Copy{static_cast<std::uint32_t>(table.width)}, queue);
  }
  dispatch(type, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (!std::is_same_v<T, Bool>) {
      reduce_as<T>(op, table, static_cast<std::uint32_t>(sources), pre, post, queue);
    }
  });
}

}  // namespace sordino::kernels::cuda
