// Element-wise CPU kernels over flat memory. One idea: every reduction reads N sources once and writes M
// destinations once, so a node-local average is one pass over memory.
//
// All functions accept any alignment and any count (0 included), never allocate, never throw on valid
// arguments, and give the same bits at every instruction set level (no contraction of a*b+c).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace sordino::kernels {

// A run of bytes of one tensor; flatten and unflatten take many per call.
struct Span {
  std::byte* data;
  std::size_t bytes;
};

// The stores to the destinations of a reduction after the first. kPublished: those of publish() (publish.h).
enum class Others { kOrdinary, kPublished };

// destinations[k][i] = post * fold(op, pre * sources[0][i], pre * sources[1][i], ...) for i < count and all k.
// Sources are folded in order. A destination may be exactly one of the sources; partial overlap is not allowed.
// op is kSum, kMin, kMax or kProduct (averages are kSum with post = 1/N).
// float16 and bfloat16 accumulate in float32 and round once (nearest even), NaN stays NaN.
// float32 is scaled in float32, float64 in float64. When pre or post is 1 that multiplication is skipped, so
// that plain sums are exact. Integers: sums and products wrap modulo 2^bits; a scale other than 1 is applied in
// double and truncated toward zero, saturated to the type's range (NaN becomes 0). bool: sum and max are OR, product
// and min are AND, scales are ignored. min and max of floats: NaN wins, and of -0 and +0 the later source's.
// Which NaN a result is (sign, payload) is not specified and may differ between levels. A lone source with no scale is
// copied bit for bit. UsageError if there is no source or op is not one of the four.
void reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
            std::span<std::byte* const> destinations, std::size_t count, double pre, double post,
            Others others = Others::kOrdinary);

// data[i] = factor * data[i], with the scaling rules of reduce.
void scale(DType type, std::byte* data, std::size_t count, double factor);

// y[i] = a * x[i] + b * y[i]; x may be y; floating types only (16-bit ones computed in float32), UsageError otherwise.
void axpby(DType type, const std::byte* x, std::byte* y, std::size_t count, double a, double b);

// The three dot products that Adasum needs, accumulated in double: <x,x>, <x,y>, <y,y>. Floating types only.
struct Dots {
  double xx, xy, yy;
};
Dots dots(DType type, const std::byte* x, const std::byte* y, std::size_t count);

// |x - y|^2, accumulated in double. Floating types only.
double squared_distance(DType type, const std::byte* x, const std::byte* y, std::size_t count);

// Copies many spans into / out of one flat buffer, back to back. Spans with no data or no bytes take no room in it.
void flatten(std::span<const Span> tensors, std::byte* flat);
void unflatten(const std::byte* flat, std::span<const Span> tensors);

// The instruction set level in use: "baseline", "avx2" or "avx512". Chosen once, from the CPU and
// SORDINO_CPU_LEVEL (base/config.h), which may only lower it.
std::string_view level();

// For tests and benchmarks: switches to a level; UsageError if this CPU or build lacks it.
void set_level(std::string_view level);

}  // namespace sordino::kernels
