// Kernels of a device: each call puts work on a queue, which runs it some time after the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "kernels/codecs.h"
#include "kernels/kernels.h"
#include "kernels/mix.h"
#include "kernels/unchanged.h"

namespace sordino {

// A queue of work: a handle of the device's runtime (a cudaStream_t). 0 is the runtime's default queue.
using Stream = std::uintptr_t;

// Addresses of tensors: row t has `width` addresses, from addresses[t * width] on, of counts[t] elements each.
struct Rows {
  std::size_t width;
  std::vector<std::byte*> addresses;
  std::vector<std::size_t> counts;
  std::size_t size() const { return counts.size(); }
};

// Kernels of kernels/kernels.h, codecs.h, mix.h and unchanged.h on device memory. Results have the same bits as there,
// with two exceptions: sums of squares and products are added in another order (always the same), and NaNs may have
// other bits. When a call returns, it has read all arrays of addresses. Tensors are aligned to their elements at least.
// Calls throw the same errors as those functions, and DeviceError.
class Kernels {
 public:
  virtual ~Kernels() = default;

  // In each row, the first `sources` addresses are sources, and all others are destinations.
  virtual void reduce(ReduceOp op, DType type, const Rows& rows, std::size_t sources, double pre, double post,
                      Stream stream) = 0;
  // y = a * x + b * y for each row (x, y).
  virtual void axpby(DType type, const Rows& rows, double a, double b, Stream stream) = 0;
  virtual void flatten(std::span<const kernels::Span> tensors, std::byte* flat, Stream stream) = 0;
  virtual void unflatten(const std::byte* flat, std::span<const kernels::Span> tensors, Stream stream) = 0;
  virtual void mix(DType type, std::span<const std::byte* const> inputs, std::span<std::byte* const> outputs,
                   std::span<const kernels::Average> averages, std::size_t count, Stream stream) = 0;

  // results[3 t], [3 t + 1], [3 t + 2] = <x, x>, <x, y>, <y, y> of row t = (x, y). In device or pinned memory.
  virtual void dots(DType type, const Rows& rows, double* results, Stream stream) = 0;
  // results[t] = |x - y|^2 of row t = (x, y).
  virtual void squared_distances(DType type, const Rows& rows, double* results, Stream stream) = 0;
  // results[t] = |x| (2-norm) of row t = (x).
  virtual void norms(DType type, const Rows& rows, double* results, Stream stream) = 0;

  // Codec::encode. If `infinite` is not null, *infinite goes up by the number of blocks with a value that is not
  // finite. `encoded` may have any alignment.
  virtual void encode(const kernels::Codec& codec, const float* values, std::size_t count, std::byte* encoded,
                      std::uint32_t* infinite, Stream stream) = 0;
  // Codec::decode with Outside::kLeaveOut.
  virtual void decode(const kernels::Codec& codec, const std::byte* encoded, std::size_t count, float* values,
                      float weight, bool add, float* given, Stream stream) = 0;

  // As in kernels/unchanged.h. All arrays are in device memory or pinned memory.
  virtual void unchanged(const kernels::Items& items, const std::byte* now, std::byte* before, std::byte* counts,
                         int digits, std::byte* counters, Stream stream) = 0;
  virtual void draw(const kernels::Items& items, std::uint64_t key, std::byte* indices, Stream stream) = 0;
  virtual void select(const kernels::Items& items, const std::byte* counters, std::byte* indices, Stream stream) = 0;
  virtual void save_at(const kernels::Items& items, const std::byte* now, const std::byte* indices, std::byte* saved,
                       Stream stream) = 0;
  virtual void unchanged_at(const kernels::Items& items, const std::byte* now, const std::byte* saved,
                            const std::byte* indices, std::byte* counts, int digits, Stream stream) = 0;

  // One step of LARS (python/sordino/torch/lars.py) of row t = (weights, gradient, velocity), or (weights, gradient) if
  // momentum is 0: rates[t] is lr times the tensor's local rate. Computed in float, or in double for float64.
  //   d = rates[t] * (gradient + decay * weights);  velocity = momentum * velocity + d
  //   weights -= velocity   (nesterov: weights -= d + momentum * velocity)
  struct LarsStep {
    double decay, momentum;
    bool nesterov;
  };
  virtual void lars_step(DType type, const Rows& rows, const double* rates, const LarsStep& how, Stream stream) = 0;
  // rates[t] = lr * (trust * w / (g + decay * w + eps) if scaled[t] and w > 0 and g > 0, else 1), where
  // w = weight_norms[t] and g = gradient_norms[t]. scaled: one byte per tensor, read before the call returns.
  struct LarsRates {
    double lr, trust, decay, eps;
  };
  virtual void lars_rates(const double* weight_norms, const double* gradient_norms,
                          std::span<const std::uint8_t> scaled, double* rates, const LarsRates& how, Stream stream) = 0;
};

}  // namespace sordino
