#include "arena/arena.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "engine/world.h"

namespace sordino::bindings {
namespace {

// Shared memory in Python, which lives as long as a buffer of it.
struct PyMemory {
  std::shared_ptr<Segment> segment;
};

// (name, dtype code, shape) of each tensor
using Specs = std::vector<std::tuple<std::string, int, std::vector<std::int64_t>>>;

std::vector<TensorSpec> specify(const Specs& tensors) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, dtype, shape] : tensors) specs.push_back({name, dtype_of(dtype), shape});
  return specs;
}

}  // namespace

void register_arena(py::module_& module) {
  py::class_<PyMemory>(module, "SharedMemory", py::buffer_protocol(), "Memory that all ranks of this node can map.")
      .def_static(
          "adopt",
          [](World& world, std::uintptr_t address, std::size_t bytes, int fd) {
            return PyMemory{world.node_memory().adopt(pointer(address), bytes, fd)};
          },
          py::arg("world"), py::arg("address"), py::arg("bytes"), py::arg("fd"),
          "Offer memory of another owner, who has mapped it from a file and keeps it longer than this object lives.")
      .def_buffer([](PyMemory& self) { return as_bytes(self.segment->data, self.segment->bytes); });

  py::class_<LayoutSegment>(module, "LayoutSegment", "Adjacent tensors that are exchanged as one.")
      .def_readonly("first", &LayoutSegment::first)
      .def_readonly("last", &LayoutSegment::last)
      .def_readonly("offset", &LayoutSegment::offset)
      .def_readonly("bytes", &LayoutSegment::bytes)
      .def_readonly("group", &LayoutSegment::group)
      .def_property_readonly("dtype", [](const LayoutSegment& self) { return static_cast<int>(self.dtype); });

  py::class_<Layout, std::shared_ptr<Layout>>(
      module, "Layout", "Offsets of tensors in flat memory. Ranks that name the same tensors get the same layout.")
      .def(py::init(
               [](const Specs& tensors, std::size_t segment_bytes) { return Layout(specify(tensors), segment_bytes); }),
           py::arg("tensors"), py::arg("segment_bytes"))
      .def(py::init([](const Specs& tensors, const std::vector<std::size_t>& groups) {
             return Layout(specify(tensors), groups);
           }),
           py::arg("tensors"), py::arg("groups"))
      .def_static(
          "of_parts",
          [](const std::vector<std::tuple<std::size_t, std::size_t, int, std::size_t>>& parts, std::size_t bytes) {
            std::vector<LayoutSegment> segments;
            for (const auto& [offset, length, dtype, group] : parts)
              segments.push_back({0, 0, offset, length, dtype_of(dtype), group});
            return Layout::of_parts(std::move(segments), bytes);
          },
          py::arg("parts"), py::arg("bytes"), "Parts of an arena: (offset, bytes, dtype code, group) of each.")
      .def_property_readonly("offsets", &Layout::offsets)
      .def_property_readonly("segments", &Layout::segments)
      .def_property_readonly("bytes", &Layout::bytes)
      .def_property_readonly("hash", &Layout::hash)
      .def("describe", &Layout::describe);

  py::class_<Arena>(module, "Arena", "Shared memory for the tensors of a layout.")
      .def(py::init([](World& world, const Layout& layout, std::shared_ptr<PyDevice> device) {
             py::gil_scoped_release released;  // allocating GPU memory may take a while
             return Arena(layout, world.node_memory(), device_of(device.get()));
           }),
           py::arg("world"), py::arg("layout"), py::arg("device") = py::none())
      .def_property_readonly("memory", [](const Arena& self) { return PyMemory{self.memory()}; })
      .def(
          "address",
          [](const Arena& self, std::size_t index) { return reinterpret_cast<std::uintptr_t>(self.tensor(index)); },
          py::arg("index"));
}

}  // namespace sordino::bindings
