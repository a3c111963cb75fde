// Element types, and the only place where a run-time type becomes a compile-time type.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "base/error.h"

namespace sordino {

enum class DType : std::uint8_t {
  kBool = 0,
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
};
inline constexpr int kDTypeCount = 13;

// Storage types of the 16-bit floats and of bool. They are distinct, so that templates can tell them apart.
struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Bool {
  std::uint8_t byte;  // 0 or 1
};

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t sizes[kDTypeCount] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return sizes[static_cast<int>(type)];
}

// Number of elements of a tensor.
inline std::size_t count_of(std::span<const std::int64_t> shape) {
  std::size_t product = 1;
  for (const std::int64_t extent : shape) product *= static_cast<std::size_t>(extent);
  return product;
}

constexpr std::string_view name_of(DType type) {
  constexpr std::string_view names[kDTypeCount] = {"bool",     "uint8",   "int8",   "uint16", "int16",
                                                   "uint32",   "int32",   "uint64", "int64",  "float16",
                                                   "bfloat16", "float32", "float64"};
  return names[static_cast<int>(type)];
}

constexpr bool is_floating(DType type) { return static_cast<int>(type) >= static_cast<int>(DType::kFloat16); }

template <class T>
struct TypeTag {
  using type = T;
};

// Calls visitor(TypeTag<T>{}) with the storage type of `type`.
template <class Visitor>
decltype(auto) dispatch(DType type, Visitor&& visitor) {
  switch (type) {
    case DType::kBool: return visitor(TypeTag<Bool>{});
    case DType::kUInt8: return visitor(TypeTag<std::uint8_t>{});
    case DType::kInt8: return visitor(TypeTag<std::int8_t>{});
    case DType::kUInt16: return visitor(TypeTag<std::uint16_t>{});
    case DType::kInt16: return visitor(TypeTag<std::int16_t>{});
    case DType::kUInt32: return visitor(TypeTag<std::uint32_t>{});
    case DType::kInt32: return visitor(TypeTag<std::int32_t>{});
    case DType::kUInt64: return visitor(TypeTag<std::uint64_t>{});
    case DType::kInt64: return visitor(TypeTag<std::int64_t>{});
    case DType::kFloat16: return visitor(TypeTag<Half>{});
    case DType::kBFloat16: return visitor(TypeTag<BFloat16>{});
    case DType::kFloat32: return visitor(TypeTag<float>{});
    case DType::kFloat64: return visitor(TypeTag<double>{});
  }
  throw UsageError("unknown element type code " + std::to_string(static_cast<int>(type)));
}

// Operation of a reduction on the elements of all ranks. The numbers are Horovod's.
enum class ReduceOp : std::uint8_t { kAverage = 0, kSum = 1, kAdasum = 2, kMin = 3, kMax = 4, kProduct = 5 };
inline constexpr ReduceOp kLastReduceOp = ReduceOp::kProduct;

// Operation and factor of a reduction: an average is a sum, divided by the number of members of the process set.
//
// Integers times a factor are truncated toward zero. So for integers the factor is never below the exact quotient:
// otherwise 49 times 1/49 would be 0. The truncated average is then exact for integers of up to 32 bits.
struct Folding {
  ReduceOp op;
  double post;
};
inline Folding folding_of(ReduceOp op, DType dtype, double postscale, int members) {
  if (op != ReduceOp::kAverage) return {op, postscale};
  double factor = postscale / members;
  if (!is_floating(dtype) && std::fma(std::abs(factor), members, -std::abs(postscale)) < 0)
    factor = std::nextafter(factor, std::copysign(std::numeric_limits<double>::infinity(), factor));
  return {ReduceOp::kSum, factor};
}

// For partial sums in float16: moves the factor of an average before the sum, which keeps the sums in range.
constexpr void divide_first(DType dtype, ReduceOp op, double& pre, double& post) {
  if (dtype == DType::kFloat16 && op == ReduceOp::kSum && post < 1) {
    pre *= post;
    post = 1;
  }
}

}  // namespace sordino
