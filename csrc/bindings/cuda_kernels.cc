// CUDA kernels on raw addresses, for tests and benchmarks. The caller waits for the work, and keeps the memory alive
// until then.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "device/cuda/cuda_device.h"

namespace sordino::bindings {
namespace {

using Addresses = std::vector<std::uintptr_t>;
using Tensors = std::vector<std::pair<Addresses, std::size_t>>;
using Runs = std::vector<std::pair<std::uintptr_t, std::size_t>>;
using Averages = std::vector<std::tuple<std::vector<int>, std::vector<int>, double>>;

Rows rows_of(const Tensors& tensors) {
  Rows rows{tensors.empty() ? 0 : tensors.front().first.size(), {}, {}};
  for (const auto& [addresses, count] : tensors) {
    if (addresses.size() != rows.width) throw UsageError("all rows need the same number of addresses");
    for (const auto address : addresses) rows.addresses.push_back(pointer(address));
    rows.counts.push_back(count);
  }
  return rows;
}

std::vector<kernels::Span> spans_of(const Runs& runs) {
  std::vector<kernels::Span> spans;
  for (const auto& [address, bytes] : runs) spans.push_back({pointer(address), bytes});
  return spans;
}

double* doubles(std::uintptr_t address) { return reinterpret_cast<double*>(address); }

// Every method puts its work on the given stream. Python calls it without the GIL.
class Methods {
 public:
  explicit Methods(int ordinal) : device_(cuda::make_device(ordinal)), kernels_(&device_->kernels()) {}

  void reduce(int op, int dtype, const Tensors& tensors, std::size_t sources, double pre, double post, Stream stream) {
    if (tensors.empty()) return;
    kernels_->reduce(static_cast<ReduceOp>(op), dtype_of(dtype), rows_of(tensors), sources, pre, post, stream);
  }
  void axpby(int dtype, const Tensors& tensors, double a, double b, Stream stream) {
    if (!tensors.empty()) kernels_->axpby(dtype_of(dtype), rows_of(tensors), a, b, stream);
  }
  void flatten(const Runs& tensors, std::uintptr_t flat, Stream stream) {
    kernels_->flatten(spans_of(tensors), pointer(flat), stream);
  }
  void unflatten(std::uintptr_t flat, const Runs& tensors, Stream stream) {
    kernels_->unflatten(pointer(flat), spans_of(tensors), stream);
  }
  void mix(int dtype, const Addresses& inputs, const Addresses& outputs, const Averages& averages, std::size_t count,
           Stream stream) {
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    std::vector<kernels::Average> all;
    for (const auto address : inputs) from.push_back(pointer(address));
    for (const auto address : outputs) to.push_back(pointer(address));
    for (const auto& [of, into, scale] : averages) all.push_back({of, into, scale});
    kernels_->mix(dtype_of(dtype), from, to, all, count, stream);
  }
  void dots(int dtype, const Tensors& tensors, std::uintptr_t results, Stream stream) {
    if (!tensors.empty()) kernels_->dots(dtype_of(dtype), rows_of(tensors), doubles(results), stream);
  }
  void squared_distances(int dtype, const Tensors& tensors, std::uintptr_t results, Stream stream) {
    if (!tensors.empty()) kernels_->squared_distances(dtype_of(dtype), rows_of(tensors), doubles(results), stream);
  }
  void norms(int dtype, const Tensors& tensors, std::uintptr_t results, Stream stream) {
    if (!tensors.empty()) kernels_->norms(dtype_of(dtype), rows_of(tensors), doubles(results), stream);
  }
  void encode(const kernels::Codec& codec, std::uintptr_t values, std::size_t count, std::uintptr_t encoded,
              std::uintptr_t infinite, Stream stream) {
    kernels_->encode(codec, floats(values), count, pointer(encoded), reinterpret_cast<std::uint32_t*>(infinite),
                     stream);
  }
  void decode(const kernels::Codec& codec, std::uintptr_t encoded, std::size_t count, std::uintptr_t values,
              float weight, bool add, std::uintptr_t given, Stream stream) {
    kernels_->decode(codec, pointer(encoded), count, floats(values), weight, add, floats(given), stream);
  }
  void unchanged(const kernels::Items& items, std::uintptr_t now, std::uintptr_t before, std::uintptr_t counts,
                 int digits, std::uintptr_t counters, Stream stream) {
    kernels_->unchanged(items, pointer(now), pointer(before), pointer(counts), digits, pointer(counters), stream);
  }
  void draw(const kernels::Items& items, std::uint64_t key, std::uintptr_t indices, Stream stream) {
    kernels_->draw(items, key, pointer(indices), stream);
  }
  void select(const kernels::Items& items, std::uintptr_t counters, std::uintptr_t indices, Stream stream) {
    kernels_->select(items, pointer(counters), pointer(indices), stream);
  }
  void save_at(const kernels::Items& items, std::uintptr_t now, std::uintptr_t indices, std::uintptr_t saved,
               Stream stream) {
    kernels_->save_at(items, pointer(now), pointer(indices), pointer(saved), stream);
  }
  void unchanged_at(const kernels::Items& items, std::uintptr_t now, std::uintptr_t saved, std::uintptr_t indices,
                    std::uintptr_t counts, int digits, Stream stream) {
    kernels_->unchanged_at(items, pointer(now), pointer(saved), pointer(indices), pointer(counts), digits, stream);
  }
  void lars_step(int dtype, const Tensors& tensors, std::uintptr_t rates, double decay, double momentum, bool nesterov,
                 Stream stream) {
    if (tensors.empty()) return;
    kernels_->lars_step(dtype_of(dtype), rows_of(tensors), doubles(rates), {decay, momentum, nesterov}, stream);
  }
  void lars_rates(std::uintptr_t weight_norms, std::uintptr_t gradient_norms, const std::string& scaled,
                  std::uintptr_t rates, double lr, double trust, double decay, double eps, Stream stream) {
    const std::vector<std::uint8_t> flags(scaled.begin(), scaled.end());
    kernels_->lars_rates(doubles(weight_norms), doubles(gradient_norms), flags, doubles(rates), {lr, trust, decay, eps},
                         stream);
  }

 private:
  std::shared_ptr<Device> device_;
  Kernels* kernels_;
};

}  // namespace

void register_cuda_kernels(py::module_& module) {
  auto cuda = module.def_submodule("cuda_kernels", "Element-wise CUDA kernels on raw addresses.");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  const auto named = py::kw_only();
  const auto stream = py::arg("stream") = 0;
  py::class_<Methods>(cuda, "CudaKernels",
                      "CUDA kernels of one device. Rows are (addresses, elements) of one tensor each.")
      .def(py::init<int>(), py::arg("ordinal"))
      .def("reduce", &Methods::reduce, py::arg("op"), py::arg("dtype"), py::arg("rows"), py::arg("sources"),
           py::arg("pre") = 1.0, py::arg("post") = 1.0, named, stream, no_gil,
           "Fold the first `sources` addresses of each row into all others.")
      .def("axpby", &Methods::axpby, py::arg("dtype"), py::arg("rows"), py::arg("a"), py::arg("b"), named, stream,
           no_gil, "y = a * x + b * y of rows (x, y)")
      .def("flatten", &Methods::flatten, py::arg("tensors"), py::arg("flat"), named, stream, no_gil,
           "Copies (address, bytes) runs into one flat buffer, back to back.")
      .def("unflatten", &Methods::unflatten, py::arg("flat"), py::arg("tensors"), named, stream, no_gil,
           "Copies one flat buffer into (address, bytes) runs.")
      .def("mix", &Methods::mix, py::arg("dtype"), py::arg("inputs"), py::arg("outputs"), py::arg("averages"),
           py::arg("count"), named, stream, no_gil,
           "Each average is (indices into inputs, indices into outputs, scale).")
      .def("dots", &Methods::dots, py::arg("dtype"), py::arg("rows"), py::arg("results"), named, stream, no_gil,
           "<x, x>, <x, y> and <y, y> of rows (x, y), as float64.")
      .def("squared_distances", &Methods::squared_distances, py::arg("dtype"), py::arg("rows"), py::arg("results"),
           named, stream, no_gil, "|x - y|^2 of rows (x, y), as float64.")
      .def("norms", &Methods::norms, py::arg("dtype"), py::arg("rows"), py::arg("results"), named, stream, no_gil,
           "|x| of rows (x), as float64.")
      .def("encode", &Methods::encode, py::arg("codec"), py::arg("values"), py::arg("count"), py::arg("encoded"),
           py::arg("infinite") = 0, named, stream, no_gil,
           "Adds the number of blocks with a value that is not finite to the uint32 at `infinite`.")
      .def("decode", &Methods::decode, py::arg("codec"), py::arg("encoded"), py::arg("count"), py::arg("values"),
           py::arg("weight"), py::arg("add"), py::arg("given") = 0, named, stream, no_gil)
      .def("unchanged", &Methods::unchanged, py::arg("items"), py::arg("now"), py::arg("before"), py::arg("counts"),
           py::arg("digits") = kernels::kExact, py::arg("counters") = 0, named, stream, no_gil)
      .def("draw", &Methods::draw, py::arg("items"), py::arg("key"), py::arg("indices"), named, stream, no_gil)
      .def("select", &Methods::select, py::arg("items"), py::arg("counters"), py::arg("indices"), named, stream, no_gil)
      .def("save_at", &Methods::save_at, py::arg("items"), py::arg("now"), py::arg("indices"), py::arg("saved"), named,
           stream, no_gil)
      .def("unchanged_at", &Methods::unchanged_at, py::arg("items"), py::arg("now"), py::arg("saved"),
           py::arg("indices"), py::arg("counts"), py::arg("digits") = kernels::kExact, named, stream, no_gil)
      .def("lars_step", &Methods::lars_step, py::arg("dtype"), py::arg("rows"), py::arg("rates"), py::arg("decay"),
           py::arg("momentum"), py::arg("nesterov"), named, stream, no_gil,
           "A step of rows (weights, gradient, velocity), or (weights, gradient) without momentum.")
      .def("lars_rates", &Methods::lars_rates, py::arg("weight_norms"), py::arg("gradient_norms"), py::arg("scaled"),
           py::arg("rates"), py::arg("lr"), py::arg("trust"), py::arg("decay"), py::arg("eps"), named, stream, no_gil,
           "`scaled` has one byte per tensor: not 0 if its rate is scaled.");
}

}  // namespace sordino::bindings
