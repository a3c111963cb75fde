// DLPack's table of C functions (`__dlpack_c_exchange_api__` of a tensor type; torch 2.10 and later), by which a
// tensor's address, type and shape are read in one call, without Python objects. The structs are those of DLPack 1
// (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace sordino::bindings::dlpack {

inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::int32_t kCpu = 1;

struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;

  bool operator==(const DataType&) const = default;
};

// Description of a tensor. Its pointers are valid as long as the tensor is.
struct Tensor {
  void* data;
  std::int32_t device_type, device;
  std::int32_t dimensions;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major
  std::uint64_t offset;   // in bytes, to be added to `data`
};

struct Header {
  std::uint32_t major, minor;
  Header* previous;
};

// Returns 0, or -1 with a Python exception.
using Describe = int (*)(void* object, Tensor* out);

struct Table {
  Header header;
  void* allocate;
  void* to_managed;
  void* from_managed;
  Describe describe;  // may be null
  void* stream;
};

// Returns the function that describes tensors of a type. Null if the type has no such function.
inline Describe describe_of(const pybind11::object& type) {
  const pybind11::object capsule = pybind11::getattr(type, "__dlpack_c_exchange_api__", pybind11::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  auto* header = static_cast<Header*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  while (header && header->major != kVersion) header = header->previous;
  return header ? reinterpret_cast<Table*>(header)->describe : nullptr;
}

inline bool is_row_major(const Tensor& tensor) {
  if (!tensor.strides) return true;
  bool matches = true;
  std::int64_t expected = 1;
  for (int axis = tensor.dimensions - 1; axis >= 0; --axis) {
    const std::int64_t extent = tensor.shape[axis];
    if (extent == 0) return true;
    if (extent != 1) matches &= tensor.strides[axis] == expected;
    expected *= extent;
  }
  return matches;
}

}  // namespace sordino::bindings::dlpack
