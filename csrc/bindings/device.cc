// Devices, and their kernels on the stream that the caller computes on.
#include "bindings/device.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <atomic>

#include "device/cuda/cuda_device.h"
#include "device/sim/sim_device.h"
#include "transport/nccl/loader.h"

namespace sordino::bindings {
namespace {

// Addresses by row, and the number of elements of each row.
Rows rows_of(const std::vector<std::vector<std::uintptr_t>>& addresses, std::vector<std::size_t> counts) {
  if (addresses.size() != counts.size()) throw UsageError("there must be a count for each row of addresses");
  Rows rows{addresses.empty() ? 0 : addresses.front().size(), {}, std::move(counts)};
  for (const auto& row : addresses) {
    if (row.size() != rows.width) throw UsageError("all rows of addresses must have the same length");
    for (const std::uintptr_t address : row) rows.addresses.push_back(pointer(address));
  }
  return rows;
}

double* numbers(std::uintptr_t address) { return reinterpret_cast<double*>(address); }

// Calls `work` with the kernels and the current stream, without the GIL.
template <class Work>
void launch(const PyDevice& self, Work&& work) {
  const Stream stream = self.stream();
  py::gil_scoped_release released;
  work(self.device->kernels(), stream);
}

void define_kernels(py::class_<PyDevice, std::shared_ptr<PyDevice>>& device) {
  using Addresses = std::vector<std::vector<std::uintptr_t>>;
  using kernels::Codec;
  using kernels::Items;
  device
      .def(
          "encode",
          [](const PyDevice& self, const Codec& codec, std::uintptr_t values, std::size_t count, std::uintptr_t encoded,
             std::uintptr_t infinite) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.encode(codec, floats(values), count, pointer(encoded), reinterpret_cast<std::uint32_t*>(infinite),
                        stream);
            });
          },
          py::arg("codec"), py::arg("values"), py::arg("count"), py::arg("encoded"), py::arg("infinite") = 0,
          "Codec.encode on the current stream. The number of blocks with a value that is not finite is added to the "
          "uint32 at `infinite`.")
      .def(
          "decode",
          [](const PyDevice& self, const Codec& codec, std::uintptr_t encoded, std::size_t count, std::uintptr_t values,
             float weight, bool add, std::uintptr_t given) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.decode(codec, pointer(encoded), count, floats(values), weight, add, floats(given), stream);
            });
          },
          py::arg("codec"), py::arg("encoded"), py::arg("count"), py::arg("values"), py::arg("weight"), py::arg("add"),
          py::arg("given") = 0, "Codec.decode on the current stream, without positions beyond the end of their block.")
      .def(
          "unchanged",
          [](const PyDevice& self, const Items& items, std::uintptr_t now, std::uintptr_t before, std::uintptr_t counts,
             int digits, std::uintptr_t counters) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.unchanged(items, pointer(now), pointer(before), pointer(counts), digits, pointer(counters), stream);
            });
          },
          py::arg("items"), py::arg("now"), py::arg("before"), py::arg("counts"), py::arg("digits"),
          py::arg("counters") = 0, "Items.unchanged on the current stream. The next four methods run there, too.")
      .def(
          "draw",
          [](const PyDevice& self, const Items& items, std::uint64_t key, std::uintptr_t indices) {
            launch(self, [&](Kernels& on, Stream stream) { on.draw(items, key, pointer(indices), stream); });
          },
          py::arg("items"), py::arg("key"), py::arg("indices"))
      .def(
          "select",
          [](const PyDevice& self, const Items& items, std::uintptr_t counters, std::uintptr_t indices) {
            launch(self,
                   [&](Kernels& on, Stream stream) { on.select(items, pointer(counters), pointer(indices), stream); });
          },
          py::arg("items"), py::arg("counters"), py::arg("indices"))
      .def(
          "save_at",
          [](const PyDevice& self, const Items& items, std::uintptr_t now, std::uintptr_t indices,
             std::uintptr_t saved) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.save_at(items, pointer(now), pointer(indices), pointer(saved), stream);
            });
          },
          py::arg("items"), py::arg("now"), py::arg("indices"), py::arg("saved"))
      .def(
          "unchanged_at",
          [](const PyDevice& self, const Items& items, std::uintptr_t now, std::uintptr_t saved, std::uintptr_t indices,
             std::uintptr_t counts, int digits) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.unchanged_at(items, pointer(now), pointer(saved), pointer(indices), pointer(counts), digits, stream);
            });
          },
          py::arg("items"), py::arg("now"), py::arg("saved"), py::arg("indices"), py::arg("counts"), py::arg("digits"))
      .def(
          "squared_distances",
          [](const PyDevice& self, int dtype, const Addresses& addresses, std::vector<std::size_t> counts,
             std::uintptr_t results) {
            const Rows rows = rows_of(addresses, std::move(counts));
            launch(self, [&](Kernels& on, Stream stream) {
              on.squared_distances(dtype_of(dtype), rows, numbers(results), stream);
            });
          },
          py::arg("dtype"), py::arg("addresses"), py::arg("counts"), py::arg("results"),
          "results[t] (float64) = |x - y|^2 of row t of addresses, (x, y).")
      .def(
          "norms",
          [](const PyDevice& self, int dtype, const Addresses& addresses, std::vector<std::size_t> counts,
             std::uintptr_t results) {
            const Rows rows = rows_of(addresses, std::move(counts));
            launch(self,
                   [&](Kernels& on, Stream stream) { on.norms(dtype_of(dtype), rows, numbers(results), stream); });
          },
          py::arg("dtype"), py::arg("addresses"), py::arg("counts"), py::arg("results"),
          "results[t] (float64) = |x| of row t of addresses, (x).")
      .def(
          "lars_rates",
          [](const PyDevice& self, std::uintptr_t weight_norms, std::uintptr_t gradient_norms,
             const std::vector<std::uint8_t>& scaled, std::uintptr_t rates, double lr, double trust, double decay,
             double eps) {
            launch(self, [&](Kernels& on, Stream stream) {
              on.lars_rates(numbers(weight_norms), numbers(gradient_norms), scaled, numbers(rates),
                            {lr, trust, decay, eps}, stream);
            });
          },
          py::arg("weight_norms"), py::arg("gradient_norms"), py::arg("scaled"), py::arg("rates"), py::arg("lr"),
          py::arg("trust"), py::arg("decay"), py::arg("eps"), "rates[t] (float64) = lr times tensor t's local rate.")
      .def(
          "lars_step",
          [](const PyDevice& self, int dtype, const Addresses& addresses, std::vector<std::size_t> counts,
             std::uintptr_t rates, double decay, double momentum, bool nesterov) {
            const Rows rows = rows_of(addresses, std::move(counts));
            launch(self, [&](Kernels& on, Stream stream) {
              on.lars_step(dtype_of(dtype), rows, numbers(rates), {decay, momentum, nesterov}, stream);
            });
          },
          py::arg("dtype"), py::arg("addresses"), py::arg("counts"), py::arg("rates"), py::arg("decay"),
          py::arg("momentum"), py::arg("nesterov"),
          "A step of LARS on rows of addresses, (weights, gradient, velocity) or, without momentum, the first two.");
}

}  // namespace

Stream PyDevice::running_stream(const std::string& what) const {
  const Stream now = stream();
  if (!device->capturing(now)) return now;
  throw UsageError(what +
                   " while a CUDA graph is being captured (torch.cuda.graph): the ranks communicate each time, which a "
                   "graph cannot repeat. Do it before or after the capture.");
}

void PyDevice::keep_until(std::shared_ptr<Event> event, py::object owner) {
  kept.emplace_back(std::move(event), std::move(owner));
}

void PyDevice::release_kept() noexcept {
  if (kept.empty()) return;
  std::vector<py::object> released;  // destroyed at the end, because that may run Python code, which may call this
  std::erase_if(kept, [&](auto& one) {
    try {
      if (!one.first->done()) return false;
    } catch (const Error&) {
      return false;  // the device has failed, and may still read and write
    }
    released.push_back(std::move(one.second));
    return true;
  });
}

void register_device(py::module_& module) {
  py::class_<PyDevice, std::shared_ptr<PyDevice>> device(module, "Device", "A GPU or a simulated one.");
  device.def_property_readonly("ordinal", [](const PyDevice& self) { return self.device->ordinal(); })
      .def_property_readonly("name", [](const PyDevice& self) { return self.device->name(); })
      .def_property_readonly(
          "identity", [](const PyDevice& self) { return self.device->identity(); },
          "Number of the hardware, equal in every process.")
      .def_readwrite(
          "current_stream", &PyDevice::current_stream,
          "Function that returns the queue on which the calling thread computes; None for the default queue.")
      .def(
          "wait_for",
          [](const PyDevice& self, const std::vector<Stream>& streams) {
            const Stream now = self.stream();
            for (const Stream stream : streams) {
              if (stream != now) self.device->wait(now, self.device->record(stream));
            }
          },
          py::arg("streams"), "Let the current stream wait for the work that other streams have now.")
      .def(
          "on_no_room",
          [](const PyDevice& self, std::function<void()> make_room) {
            self.device->on_no_room([make_room = std::move(make_room)] {
              const py::gil_scoped_acquire held;
              try {
                make_room();
              } catch (py::error_already_set& error) {
                if (!error.matches(PyExc_Exception)) throw;  // a KeyboardInterrupt
                throw Error(py::str(error.value()).cast<std::string>());
              }
            });
          },
          py::arg("make_room"),
          "Set the function that frees device memory after a failed allocation, which is then tried again. Any thread "
          "may call it. If it raises, and there is no room, the error of the allocation has the reason.");
  define_kernels(device);

  module.def("cuda_devices", &cuda::count, "Number of GPUs that CUDA finds here; 0 without CUDA or a driver.");
  module.def("cuda_obstacle", &cuda::obstacle, "The reason why CUDA finds no GPU, and the fix; empty if it finds one.");
  module.def(
      "cuda_device",
      [](int ordinal) { return std::make_shared<PyDevice>(PyDevice{cuda::make_device(ordinal), py::none()}); },
      py::arg("ordinal"),
      "The GPU with this CUDA number. Raises NotBuilt if this build has no CUDA or no kernels for it.");
  module.def(
      "sim_device",
      [](int ordinal, bool shares, bool takes_nccl, bool waits_for_words, bool pools, std::size_t room) {
        const sim::Traits traits{shares, takes_nccl, waits_for_words, pools, room};
        return std::make_shared<PyDevice>(PyDevice{sim::make_device(ordinal, traits), py::none()});
      },
      py::arg("ordinal"), py::arg("shares") = true, py::arg("takes_nccl") = false, py::arg("waits_for_words") = true,
      py::arg("pools") = true, py::arg("room") = SIZE_MAX,
      "A thread that simulates a GPU with `room` bytes of memory. Devices with the same number are the same GPU.");
  module.def(
      "sim_stream", [](const PyDevice& on) { return on.device->make_queue(); }, py::arg("device"),
      "A further queue of a simulated device, which lives as long as the device.");
  module.def(
      "sim_occupied", [](const PyDevice& on) { return sim::occupied(*on.device); }, py::arg("device"),
      "Bytes of a simulated device's memory that are in use.");
  module.def("sim_capture", &sim::capture, py::arg("stream"), py::arg("on"),
             "Mark a queue of a simulated device as being captured, or not.");
  module.def(
      "sim_hold",
      [](Stream stream) {
        auto gate = std::make_shared<std::atomic<bool>>(false);
        sim::enqueue(stream, [gate] { gate->wait(false); });
        return py::cpp_function([gate] {
          *gate = true;
          gate->notify_all();
        });
      },
      py::arg("stream"), "Block a queue of a simulated device until the returned function is called.");
  module.def("nccl_hint", &nccl::hint, py::arg("path"), "Name a further file to try as libnccl.so.2.");
  module.def("nccl", &nccl::describe, "Version and file of the NCCL in use. Raises NotBuilt without NCCL.");
}

}  // namespace sordino::bindings
