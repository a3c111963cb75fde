// Declarations that the binding files share: their registration functions, and conversions of addresses and buffers.
#pragma once

#include <pybind11/pybind11.h>

#include "base/dtype.h"

namespace sordino {
class World;
}

namespace sordino::bindings {

namespace py = pybind11;

void register_errors(py::module_& module);
void register_build(py::module_& module);
void register_log(py::module_& module);
void register_kernels(py::module_& module);
void register_cuda_kernels(py::module_& module);
void register_codecs(py::module_& module);
void register_unchanged(py::module_& module);
void register_topology(py::module_& module);
void register_operations(py::module_& module);
void register_world(py::module_& module);
void register_worlds(py::module_& module);
void register_arena(py::module_& module);
void register_services(py::module_& module);
void register_device(py::module_& module);
void register_gradient_counter(py::module_& module);
py::object repeat_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& dtypes,
                     py::object note_change, py::dict in_flight, py::object number);
py::object messages_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& dtypes,
                       py::object note_change);

// Addresses enter the core as integers, so the core never sees a torch type.
inline std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }
inline float* floats(std::uintptr_t address) { return reinterpret_cast<float*>(address); }
inline DType dtype_of(int code) {
  if (code < 0 || code >= kDTypeCount) throw UsageError("unknown element type code " + std::to_string(code));
  return static_cast<DType>(code);
}
inline py::buffer_info as_bytes(std::byte* data, std::size_t bytes) {
  return py::buffer_info(data, 1, py::format_descriptor<std::uint8_t>::format(), 1, {static_cast<py::ssize_t>(bytes)},
                         {py::ssize_t{1}});
}

}  // namespace sordino::bindings
