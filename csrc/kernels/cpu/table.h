// What one instruction set level offers: function pointers by element type and operation.
//
// The levels are compiled from the same source with different flags, so this seam uses plain structs and raw
// pointers only: an inline std:: function instantiated in the AVX-512 file would be a weak symbol, and the linker
// might keep that copy for everybody.
#pragma once

#include <cstddef>

#include "base/dtype.h"
#include "kernels/kernels.h"

namespace sordino::kernels {

// The arguments of kernels::reduce; at least one source, one destination and one element.
struct Reduction {
  const std::byte* const* sources;
  std::size_t source_count;
  std::byte* const* destinations;
  std::size_t destination_count;
  std::size_t count;
  double pre;
  double post;
};

using ReduceFn = void (*)(const Reduction&);
using AxpbyFn = void (*)(const std::byte* x, std::byte* y, std::size_t count, double a, double b);
using DotsFn = Dots (*)(const std::byte* x, const std::byte* y, std::size_t count);
using DistanceFn = double (*)(const std::byte* x, const std::byte* y, std::size_t count);

inline constexpr int kReduceOpCount = 6;

// A null entry means that the operation does not exist for that type (or that it is not a fold, such as kAverage).
struct Table {
  ReduceFn reduce[kDTypeCount][kReduceOpCount];
  AxpbyFn axpby[kDTypeCount];
  DotsFn dots[kDTypeCount];
  DistanceFn squared_distance[kDTypeCount];
};

namespace baseline {
extern const Table table;
}
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}

}  // namespace sordino::kernels
