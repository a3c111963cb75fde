// The class behind make(). Its methods are spread over the .cu files, one family of operations in each.
#pragma once

#include <utility>

#include "kernels/cuda/cuda_kernels.h"

namespace sordino::kernels::cuda {

class CudaKernels final : public Kernels {
 public:
  CudaKernels(int ordinal, Lender lender) : ordinal_(ordinal), lender_(std::move(lender)) {}

  void reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
              Stream stream) override;
  void axpby(DType type, const Rows& rows, double a, double b, Stream stream) override;
  void flatten(std::span<const Span> tensors, std::byte* flat, Stream stream) override;
  void unflatten(const std::byte* flat, std::span<const Span> tensors, Stream stream) override;
  void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
           std::span<const Average> averages, std::size_t count, Stream stream) override;
  void dots(DType type, const Rows& rows, double* results, Stream stream) override;
  void squared_distances(DType type, const Rows& rows, double* results, Stream stream) override;
  void norms(DType type, const Rows& rows, double* results, Stream stream) override;
  void encode(const Codec& codec, const float* values, std::size_t count, std::byte* encoded, std::uint32_t* infinite,
              Stream stream) override;
  void decode(const Codec& codec, const std::byte* encoded, std::size_t count, float* values, float weight, bool add,
              float* given, Stream stream) override;
  void unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
                 std::byte* counters, Stream stream) override;
  void draw(const Items& items, std::uint64_t key, std::byte* indices, Stream stream) override;
  void select(const Items& items, const std::byte* counters, std::byte* indices, Stream stream) override;
  void save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
               Stream stream) override;
  void unchanged_at(const Items& items, const std::byte* now, const std::byte* saved, const std::byte* indices,
                    std::byte* counts, int digits, Stream stream) override;
  void lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) override;
  void lars_rates(const double* weight_norms, const double* gradient_norms, std::span<const std::uint8_t> scaled,
                  double* rates, const LarsRates& how, Stream stream) override;

 private:
  int ordinal_;
  Lender lender_;
};

}  // namespace sordino::kernels::cuda
