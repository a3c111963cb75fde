// Comparison of all elements, or of samples of them.
#include "kernels/cuda/items_plan.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/unchanged_ops.h"

namespace sordino::kernels::cuda {
void CudaKernels::unchanged(const Items& items, const std::byte* now, std::byte* before, std::byte* counts, int digits,
                            std::byte* counters, Stream stream) {
  items.check_digits(digits);
  const Current current(ordinal_);
  const auto queue = cuda_stream(stream);
  by_type(items, digits >= 0, [&](auto tag, const std::vector<std::size_t>& chosen) {
    using T = typename decltype(tag)::type;
    const Scratch<std::uint8_t> full(counters == nullptr ? 0 : chosen.size(), lender_, queue);
    const StoreCounts finish{reinterpret_cast<std::int64_t*>(counts), full.data(), 3};
    run_sums("unchanged", comparisons(items, chosen, now, before, counters), Compare<T>{2, scale_of(digits)}, finish,
             lender_, queue);
    if (counters != nullptr) run_elementwise("unchanged", counted(items, chosen, counters), Age{1, full.data()}, queue);
  });
}

void CudaKernels::save_at(const Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
                          Stream stream) {
  const Current current(ordinal_);
  by_type(items, false, [&](auto tag, const std::vector<std::size_t>& chosen) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_unsigned_v<T>) {
      run_elementwise("save_at", samples(items, chosen, now, indices, saved), SaveAt<T>{}, cuda_stream(stream));
    }
  });
}

void CudaKernels::unchanged_at(const Items& items, const std::byte* now, const std::byte* saved,
                               const std::byte* indices, std::byte* counts, int digits, Stream stream) {
  items.check_digits(digits);
  const Current current(ordinal_);
  by_type(items, digits >= 0, [&](auto tag, const std::vector<std::size_t>& chosen) {
    const StoreCounts finish{reinterpret_cast<std::int64_t*>(counts), nullptr, 3};
    run_sums("unchanged_at", samples(items, chosen, now, indices, saved),
             CompareAt<typename decltype(tag)::type>{scale_of(digits)}, finish, lender_, cuda_stream(stream));
  });
}

void CudaKernels::draw(const Items& items, std::uint64_t key, std::byte* indices, Stream stream) {
  const Current current(ordinal_);
  run_elementwise("draw", draws(items, key, indices), Draw{}, cuda_stream(stream));
}

}  // namespace sordino::kernels::cuda
