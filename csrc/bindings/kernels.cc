// The kernels on raw addresses, for tests and benchmarks.
#include "kernels/kernels.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "kernels/publish.h"

namespace sordino::bindings {
namespace {

using Addresses = std::vector<std::uintptr_t>;

std::vector<kernels::Span> spans(const std::vector<std::pair<std::uintptr_t, std::size_t>>& tensors) {
  std::vector<kernels::Span> all;
  for (const auto& [address, bytes] : tensors) all.push_back({pointer(address), bytes});
  return all;
}

}  // namespace

void register_kernels(py::module_& module) {
  auto kernels =
      module.def_submodule("kernels", "Element-wise CPU kernels on raw addresses. The caller keeps the memory alive.");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  kernels.def(
      "reduce",
      [](int op, int dtype, const Addresses& sources, const Addresses& destinations, std::size_t count, double pre,
         double post) {
        std::vector<const std::byte*> from;
        std::vector<std::byte*> to;
        for (const auto address : sources) from.push_back(pointer(address));
        for (const auto address : destinations) to.push_back(pointer(address));
        kernels::reduce(static_cast<ReduceOp>(op), dtype_of(dtype), from, to, count, pre, post);
      },
      py::arg("op"), py::arg("dtype"), py::arg("sources"), py::arg("destinations"), py::arg("count"),
      py::arg("pre") = 1.0, py::arg("post") = 1.0, no_gil,
      "destinations[k][i] = post * fold(op, pre * sources[j][i] for all j)");
  kernels.def(
      "scale",
      [](int dtype, std::uintptr_t data, std::size_t count, double factor) {
        kernels::scale(dtype_of(dtype), pointer(data), count, factor);
      },
      py::arg("dtype"), py::arg("data"), py::arg("count"), py::arg("factor"), no_gil, "data[i] *= factor");
  kernels.def(
      "axpby",
      [](int dtype, std::uintptr_t x, std::uintptr_t y, std::size_t count, double a, double b) {
        kernels::axpby(dtype_of(dtype), pointer(x), pointer(y), count, a, b);
      },
      py::arg("dtype"), py::arg("x"), py::arg("y"), py::arg("count"), py::arg("a"), py::arg("b"), no_gil,
      "y[i] = a * x[i] + b * y[i]");
  kernels.def(
      "squared_distance",
      [](int dtype, std::uintptr_t x, std::uintptr_t y, std::size_t count) {
        return kernels::squared_distance(dtype_of(dtype), pointer(x), pointer(y), count);
      },
      py::arg("dtype"), py::arg("x"), py::arg("y"), py::arg("count"), no_gil,
      "The sum of (x[i] - y[i])^2, in float64.");
  kernels.def(
      "flatten",
      [](const std::vector<std::pair<std::uintptr_t, std::size_t>>& tensors, std::uintptr_t flat) {
        kernels::flatten(spans(tensors), pointer(flat));
      },
      py::arg("tensors"), py::arg("flat"), no_gil,
      "Copy tensors, given as (address, bytes), into one flat buffer without gaps.");
  kernels.def(
      "unflatten",
      [](std::uintptr_t flat, const std::vector<std::pair<std::uintptr_t, std::size_t>>& tensors) {
        kernels::unflatten(pointer(flat), spans(tensors));
      },
      py::arg("flat"), py::arg("tensors"), no_gil, "Copy one flat buffer into tensors, given as (address, bytes).");
  kernels.def(
      "level", [] { return std::string(kernels::level()); }, "The instruction set in use: baseline, avx2 or avx512.");
  kernels.def("set_level", &kernels::set_level, py::arg("level"),
              "Switch the instruction set. Raises UsageError if this machine lacks it.");
  kernels.def(
      "publish",
      [](std::uintptr_t to, std::uintptr_t from, std::size_t bytes) {
        kernels::publish(pointer(to), pointer(from), bytes);
      },
      py::arg("to"), py::arg("from_"), py::arg("bytes"), no_gil, "Copy to memory that other processes read.");
  kernels.def("set_streams", &kernels::set_streams, py::arg("streams"),
              "Fix whether writes for peers bypass the caches; None: choose by the times of copies.");
  register_codecs(kernels);
  register_unchanged(kernels);
}

}  // namespace sordino::bindings
