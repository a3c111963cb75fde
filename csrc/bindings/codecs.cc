// The codecs, on raw addresses.
#include "kernels/codecs.h"

#include <pybind11/stl.h>

#include <array>

#include "bindings/bindings.h"
#include "kernels/modulo.h"

namespace sordino::bindings {
namespace {

constexpr std::array<std::string_view, kernels::kCodeCount> kNames{"int8", "int4", "two_bit",
                                                                   "sign", "top",  "top_exact"};

kernels::Codec codec_of(const std::string& name, std::size_t block, std::size_t kept) {
  for (std::size_t code = 0; code < kNames.size(); ++code) {
    if (kNames[code] == name) return {static_cast<kernels::Code>(code), block, kept};
  }
  throw UsageError("there is no codec \"" + name + "\"");
}

}  // namespace

void register_codecs(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<kernels::Codec>(module, "Codec", "Encodes float32 values in blocks (csrc/kernels/codecs.h).")
      .def(py::init(&codec_of), py::arg("code"), py::arg("block"), py::arg("kept") = 0)
      .def("bytes", &kernels::Codec::bytes, py::arg("count"), "Size of `count` encoded values.")
      .def(
          "encode",
          [](const kernels::Codec& self, std::uintptr_t values, std::size_t count, std::uintptr_t encoded) {
            return self.encode(reinterpret_cast<const float*>(values), count, pointer(encoded));
          },
          py::arg("values"), py::arg("count"), py::arg("encoded"), no_gil,
          "Returns the number of blocks with a value that is not finite.")
      .def(
          "decode",
          [](const kernels::Codec& self, std::uintptr_t encoded, std::size_t count, std::uintptr_t values, float weight,
             bool add, std::uintptr_t given) {
            self.decode(pointer(encoded), count, reinterpret_cast<float*>(values), weight, add,
                        reinterpret_cast<float*>(given));
          },
          py::arg("encoded"), py::arg("count"), py::arg("values"), py::arg("weight"), py::arg("add"),
          py::arg("given") = 0, no_gil, "values[i] = weight * x[i], or that plus its former value.");
  using kernels::ModuloCodec;
  py::class_<ModuloCodec>(module, "ModuloCodec",
                          "Encodes float32 values for receivers whose values are near (csrc/kernels/modulo.h).")
      .def(py::init<int, std::size_t>(), py::arg("bits"), py::arg("block"))
      .def("bytes", &ModuloCodec::bytes, py::arg("count"), "Size of `count` encoded values.")
      .def("blocks", &ModuloCodec::blocks, py::arg("count"), "Number of blocks of `count` values.")
      .def(
          "encode",
          [](const ModuloCodec& self, std::uintptr_t values, std::size_t count, std::uintptr_t distances,
             std::uintptr_t encoded) {
            return self.encode(reinterpret_cast<const float*>(values), count, reinterpret_cast<const float*>(distances),
                               pointer(encoded));
          },
          py::arg("values"), py::arg("count"), py::arg("distances"), py::arg("encoded"), no_gil,
          "Returns the number of blocks with a value that is not finite. `distances`: an estimate for each block.")
      .def(
          "change",
          [](const ModuloCodec& self, std::uintptr_t values, std::size_t count, std::uintptr_t own,
             const std::vector<std::uintptr_t>& sources, float weight, std::uintptr_t change,
             std::uintptr_t distances) {
            std::vector<const std::byte*> places;
            for (const std::uintptr_t source : sources) places.push_back(pointer(source));
            return self.change(reinterpret_cast<const float*>(values), count, pointer(own), places, weight,
                               reinterpret_cast<float*>(change), reinterpret_cast<float*>(distances));
          },
          py::arg("values"), py::arg("count"), py::arg("own"), py::arg("sources"), py::arg("weight"), py::arg("change"),
          py::arg("distances"), no_gil,
          "change[i] = weight * (sum over sources of (Q(x[i]) - Q(values[i]))); also updates the estimates. Returns "
          "the number of blocks that could not be decoded.");
}

}  // namespace sordino::bindings
