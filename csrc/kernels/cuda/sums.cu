// Dot products, distances and norms.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sum_ops.h"

namespace sordino::kernels::cuda {

void CudaKernels::dots(DType type, const Rows& rows, double* results, Stream stream) {
  check_width("dots", rows, 2);
  dispatch_floating("dots", type, [&](auto tag) {
    const Current current(ordinal_);
    run_sums("dots", table_of(rows), SumUp<typename decltype(tag)::type, DotSums>{}, StoreSums<DotSums>{results},
             lender_, cuda_stream(stream));
  });
}

void CudaKernels::squared_distances(DType type, const Rows& rows, double* results, Stream stream) {
  check_width("squared_distances", rows, 2);
  dispatch_floating("squared_distances", type, [&](auto tag) {
    const Current current(ordinal_);
    run_sums("squared_distances", table_of(rows), SumUp<typename decltype(tag)::type, DistanceSum>{},
             StoreSums<DistanceSum>{results}, lender_, cuda_stream(stream));
  });
}

void CudaKernels::norms(DType type, const Rows& rows, double* results, Stream stream) {
  check_width("norms", rows, 1);
  dispatch_floating("norms", type, [&](auto tag) {
    const Current current(ordinal_);
    run_sums("norms", table_of(rows), SumUp<typename decltype(tag)::type, SquareSum>{}, StoreNorm{results}, lender_,
             cuda_stream(stream));
  });
}

}  // namespace sordino::kernels::cuda
