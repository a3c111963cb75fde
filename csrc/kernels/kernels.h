// Element-wise CPU kernels over flat memory. A reduction reads all sources once and writes all destinations once, so a
// node-local average is one pass over memory.
//
// All functions accept any alignment and any count (0 included), never allocate, and never throw on valid arguments.
// Results have the same bits at every instruction set level, except for NaNs (no contraction of a*b+c).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "base/dtype.h"

namespace sordino::kernels {

// Bytes of one tensor, for flatten and unflatten.
struct Span {
  std::byte* data;
  std::size_t bytes;
};

// Kind of stores to all destinations of a reduction but the first. kPublished: as publish() stores (publish.h).
enum class Others { kOrdinary, kPublished };

// destinations[k][i] = post * fold(op, pre * sources[0][i], pre * sources[1][i], ...) for i < count and all k.
// Sources are folded in order. A destination may be exactly one of the sources, but must not overlap one partly. op is
// kSum, kMin, kMax or kProduct (an average is kSum with post = 1/N). Throws UsageError for other operations, or without
// a source. A single source with pre = post = 1 is copied bit for bit.
//
//   float16, bfloat16   computed in float32 and rounded once, to nearest even
//   float32, float64    computed in their own type
//   all floats          kMin and kMax: a NaN gives NaN; of -0 and +0, the later source's. Sign and payload of a NaN are
//                       not specified, and may differ between levels
//   integers            kSum and kProduct wrap modulo 2^bits. A scale other than 1 is applied in double. The result is
//                       truncated toward zero and limited to the type's range (NaN becomes 0)
//   bool                kSum and kMax are OR, kProduct and kMin are AND. Scales are ignored
void reduce(ReduceOp op, DType type, std::span<const std::byte* const> sources,
            std::span<std::byte* const> destinations, std::size_t count, double pre, double post,
            Others others = Others::kOrdinary);

// data[i] = factor * data[i], with the scaling rules of reduce.
void scale(DType type, std::byte* data, std::size_t count, double factor);

// y[i] = a * x[i] + b * y[i]. x may be y. 16-bit floats are computed in float32. Throws UsageError for other types.
void axpby(DType type, const std::byte* x, std::byte* y, std::size_t count, double a, double b);

// The dot products that Adasum needs, accumulated in double: <x,x>, <x,y>, <y,y>. Throws UsageError as axpby does.
struct Dots {
  double xx, xy, yy;
};
Dots dots(DType type, const std::byte* x, const std::byte* y, std::size_t count);

// |x - y|^2, accumulated in double. Throws UsageError as axpby does.
double squared_distance(DType type, const std::byte* x, const std::byte* y, std::size_t count);

// Copy many tensors into or out of one flat buffer, without gaps. Tensors without data or bytes take no room in it.
void flatten(std::span<const Span> tensors, std::byte* flat);
void unflatten(const std::byte* flat, std::span<const Span> tensors);

// The instruction set level in use: "baseline", "avx2" or "avx512". By default the best that the CPU supports.
std::string_view level();

// Switches to a level. Throws UsageError if this CPU or build lacks it.
void set_level(std::string_view level);

}  // namespace sordino::kernels
