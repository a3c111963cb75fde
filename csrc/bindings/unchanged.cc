// Counts of elements that a step left unchanged, on raw addresses.
#include "kernels/unchanged.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"

namespace sordino::bindings {
namespace {

using Sizes = std::vector<std::tuple<std::size_t, std::size_t, int>>;

kernels::Items items_of(const Sizes& specs, double ratio) {
  std::vector<kernels::Item> items;
  for (const auto& [offset, elements, dtype] : specs) items.push_back({offset, elements, dtype_of(dtype)});
  return kernels::Items(items, ratio);
}

std::vector<std::size_t> sample_counts(const kernels::Items& items) {
  std::vector<std::size_t> counts;
  for (const auto& row : items.rows()) counts.push_back(row.samples);
  return counts;
}

}  // namespace

void register_unchanged(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<kernels::Items>(module, "Items",
                             "Tensors at offsets from a base address, and the number of sampled elements of each.")
      .def(py::init(&items_of), py::arg("items"), py::arg("ratio") = 1.0, "(offset in bytes, elements, dtype) of each.")
      .def_property_readonly("elements", &kernels::Items::elements)
      .def_property_readonly("samples", &kernels::Items::samples)
      .def_property_readonly("sample_counts", &sample_counts)
      .def_property_readonly("sample_bytes", &kernels::Items::sample_bytes)
      .def(
          "unchanged",
          [](const kernels::Items& self, std::uintptr_t now, std::uintptr_t before, std::uintptr_t counts, int digits,
             std::uintptr_t counters) {
            kernels::unchanged(self, pointer(now), pointer(before), pointer(counts), digits, pointer(counters));
          },
          py::arg("now"), py::arg("before"), py::arg("counts"), py::arg("digits") = kernels::kExact,
          py::arg("counters") = 0, no_gil,
          "counts[item] (int64) = number of unchanged elements; counters (uint8) of the others are incremented; before "
          "= now.")
      .def(
          "draw",
          [](const kernels::Items& self, std::uint64_t key, std::uintptr_t indices) {
            kernels::draw(self, key, pointer(indices));
          },
          py::arg("key"), py::arg("indices"), no_gil, "Draw random samples (uint32), one from each of equal stretches.")
      .def(
          "select",
          [](const kernels::Items& self, std::uintptr_t counters, std::uintptr_t indices) {
            kernels::select(self, pointer(counters), pointer(indices));
          },
          py::arg("counters"), py::arg("indices"), no_gil, "Take the elements with the highest counters as samples.")
      .def(
          "save_at",
          [](const kernels::Items& self, std::uintptr_t now, std::uintptr_t indices, std::uintptr_t saved) {
            kernels::save_at(self, pointer(now), pointer(indices), pointer(saved));
          },
          py::arg("now"), py::arg("indices"), py::arg("saved"), no_gil, "saved[k] = now[indices[k]]")
      .def(
          "unchanged_at",
          [](const kernels::Items& self, std::uintptr_t now, std::uintptr_t saved, std::uintptr_t indices,
             std::uintptr_t counts, int digits) {
            kernels::unchanged_at(self, pointer(now), pointer(saved), pointer(indices), pointer(counts), digits);
          },
          py::arg("now"), py::arg("saved"), py::arg("indices"), py::arg("counts"), py::arg("digits") = kernels::kExact,
          no_gil, "counts[item] (int64) = number of samples that are equal in now and saved.");
}

}  // namespace sordino::bindings
