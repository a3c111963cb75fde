// Requests, exchanges, handles and results.
#include "bindings/operations.h"

#include <pybind11/stl.h>

namespace sordino::bindings {
namespace {

// (input address, output address or 0, dtype code, shape)
using TensorTuple = std::tuple<std::uintptr_t, std::uintptr_t, int, std::vector<std::int64_t>>;

// Memory of a result, which lives as long as a Python object refers to it.
struct PyResult {
  std::shared_ptr<Handle> handle;
  std::size_t index;
  Result& result() const { return handle->results[index]; }
};

// `streams`: further queues of the device on which the tensors were computed.
std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, Request request, bool wait, py::object keep,
                                std::shared_ptr<PyDevice> device, std::vector<Stream> streams = {}) {
  std::vector<Stream> origins;
  if (device) {
    device->release_kept();
    origins.push_back(device->running_stream("'" + request.name + "' was submitted"));
    for (const Stream stream : streams) {
      if (std::find(origins.begin(), origins.end(), stream) == origins.end()) origins.push_back(stream);
    }
    request.device = device->device;
    for (const Stream stream : origins) request.ready.push_back(device->device->record(stream));
  }
  std::unique_ptr<PyHandle> started;  // keeps the memory, also if the wait is interrupted
  {
    py::gil_scoped_release released;
    World& there = *world;
    auto handle = wait ? there.submit_to_wait(std::move(request)) : there.submit(std::move(request));
    started = std::make_unique<PyHandle>(std::move(world), std::move(handle), std::move(keep), std::move(device),
                                         std::move(origins));
    if (wait) there.wait(*started->handle);
  }
  return started;
}

PyRequest make_request(int opcode, std::string name, std::vector<TensorTuple> tensors, int op, double prescale,
                       double postscale, int root, std::vector<std::int64_t> splits, int process_set, py::object keep,
                       std::shared_ptr<PyDevice> device, std::vector<int> new_set, int removed_set) {
  if (opcode < 0 || opcode >= static_cast<int>(Opcode::kExchange))  // exchanges have their own class
    throw UsageError("unknown operation code " + std::to_string(opcode));
  if (op < 0 || op > static_cast<int>(ReduceOp::kProduct)) throw UsageError("unknown reduction " + std::to_string(op));
  Request request;
  request.name = std::move(name);
  request.opcode = static_cast<Opcode>(opcode);
  request.set = process_set;
  request.op = static_cast<ReduceOp>(op);
  request.prescale = prescale;
  request.postscale = postscale;
  request.root = root;
  request.splits = std::move(splits);
  request.set_change = {std::move(new_set), removed_set};
  request.tensors.reserve(tensors.size());
  for (auto& [input, output, dtype, shape] : tensors) {
    request.tensors.push_back({dtype_of(dtype), std::move(shape), pointer(input), pointer(output)});
  }
  return {std::move(request), std::move(keep), std::move(device)};
}

void register_requests(py::module_& module) {
  py::enum_<Opcode>(module, "Opcode", py::arithmetic(), "Operation codes.")
      .value("ALLREDUCE", Opcode::kAllreduce)
      .value("BROADCAST", Opcode::kBroadcast)
      .value("ALLGATHER", Opcode::kAllgather)
      .value("ALLTOALL", Opcode::kAlltoall)
      .value("REDUCESCATTER", Opcode::kReducescatter)
      .value("BARRIER", Opcode::kBarrier)
      .value("JOIN", Opcode::kJoin)
      .value("ADD_SET", Opcode::kAddSet)
      .value("REMOVE_SET", Opcode::kRemoveSet)
      .value("EXCHANGE", Opcode::kExchange);

  py::class_<PyRequest>(
      module, "Request",
      "Description of one operation. tensors: (input address, output address or 0, dtype code, shape) of each; `keep` "
      "must own their memory.")
      .def(py::init(&make_request), py::arg("opcode"), py::arg("name"), py::arg("tensors"), py::arg("op") = 1,
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0,
           py::arg("splits") = std::vector<std::int64_t>{}, py::arg("process_set") = 0, py::arg("keep") = py::none(),
           py::arg("device") = py::none(), py::arg("new_set") = std::vector<int>{}, py::arg("removed_set") = 0);
}

void register_exchanges(py::module_& module) {
  py::enum_<Route>(module, "Route", "Route of an exchange of device memory.")
      .value("HOST", Route::kHost)
      .value("DIRECT", Route::kDirect)
      .value("NCCL", Route::kNccl);

  py::class_<ReceiveBuffer, std::shared_ptr<ReceiveBuffer>>(
      module, "ReceiveBuffer", "Memory for the data that exchanges receive from other nodes.")
      .def(py::init([](World& world) { return std::make_shared<ReceiveBuffer>(world.node_memory()); }),
           py::arg("world"), py::keep_alive<1, 2>());

  py::class_<PyExchange>(module, "Exchange",
                         "The constant part of the exchanges that mix flat memory according to a topology "
                         "(csrc/collectives/exchange.h). Its process set must be used for nothing else.")
      .def(py::init([](int process_set, std::shared_ptr<Layout> layout, std::shared_ptr<topology::Topology> topology,
                       std::uintptr_t source, std::uintptr_t result, bool shared, bool without_own,
                       std::shared_ptr<ReceiveBuffer> receive_buffer, bool serving, py::object keep,
                       std::shared_ptr<PyDevice> device, Route route) {
             const Exchange what{std::move(layout),
                                 std::move(topology),
                                 pointer(source),
                                 pointer(result),
                                 shared,
                                 without_own,
                                 std::move(receive_buffer),
                                 route};
             return PyExchange{std::make_shared<Exchange>(what), process_set, serving, std::move(keep),
                               std::move(device)};
           }),
           py::kw_only(), py::arg("process_set"), py::arg("layout"), py::arg("topology"), py::arg("source"),
           py::arg("result"), py::arg("shared"), py::arg("without_own"), py::arg("receive_buffer"), py::arg("serving"),
           py::arg("keep"), py::arg("device") = py::none(), py::arg("route") = Route::kHost);
}

void register_handles(py::module_& module) {
  py::class_<PyResult>(module, "Result", py::buffer_protocol(), "Memory of a result, as bytes.")
      .def_property_readonly(
          "address", [](const PyResult& self) { return reinterpret_cast<std::uintptr_t>(self.result().data.get()); })
      .def_property_readonly("bytes", [](const PyResult& self) { return self.result().bytes; })
      .def_property_readonly(
          "on_device", [](const PyResult& self) { return self.result().device != nullptr; },
          "Whether it is memory of a device, not of the host.")
      .def(
          "copied", [](const PyResult& self, const PyDevice& device) { *self.result().reader = device.stream(); },
          py::arg("device"),
          "Note that its last reader is on the caller's stream. The memory is freed after the work there.")
      .def_buffer([](PyResult& self) { return as_bytes(self.result().data.get(), self.result().bytes); })
      .def_property_readonly("shape", [](const PyResult& self) { return self.result().shape; });

  py::class_<PyHandle>(module, "Handle", "An operation in flight.")
      .def(
          "done",
          [](const PyHandle& self) {
            const bool over = self.over();
            if (over && self.device) self.device->release_kept();
            return over;
          },
          "Whether the operation has ended, including its work on a device.")
      .def(
          "check_wait", [](const PyHandle& self) { static_cast<void>(self.check_wait()); },
          "Raise UsageError if the caller may not wait for it now. The operation stays in flight.")
      .def("wait", &PyHandle::wait, "Wait for the end of the operation, and raise its error.")
      .def(
          "finish",
          [](PyHandle& self) {
            self.handle->finish();
            self.world->wake();
          },
          "Complete a promise.")
      .def_property_readonly(
          "results",
          [](const PyHandle& self) {
            std::vector<std::unique_ptr<PyResult>> all;
            for (std::size_t index = 0; index < self.handle->results.size(); ++index) {
              all.push_back(std::make_unique<PyResult>(PyResult{self.handle, index}));
            }
            return all;
          },
          "Tensors that the core allocated, of operations without an output.")
      .def_property_readonly(
          "rows", [](const PyHandle& self) { return self.handle->rows; },
          "Rows that came from each member, tensor by tensor, of operations that count them.")
      .def_property_readonly(
          "last_rank", [](const PyHandle& self) { return self.handle->last_rank; }, "The last rank to join (join).")
      .def_property_readonly(
          "source", [](const PyHandle& self) { return self.handle->source; },
          "The rank whose message a receive has got; -1 for another operation.")
      .def_property_readonly(
          "set_id", [](const PyHandle& self) { return self.handle->set_id; }, "Id of the new process set.");
}

}  // namespace

PyHandle::~PyHandle() {
  try {
    if (over() && !world->failed() && !handle->given_up) return;
  } catch (const Error&) {
    // A device that has failed may still read and write.
  }
  keep.release();
}

Stream PyHandle::check_wait() const { return device ? device->running_stream("an operation was waited for") : 0; }

void PyHandle::wait() {
  const Stream stream = check_wait();
  {
    py::gil_scoped_release released;
    world->wait(*handle);
    if (handle->event && !handle->error) handle->device->wait(stream, handle->event);
  }
  if (handle->undone) {
    world->rethrow();
    throw PeerLost("an operation on the GPU was given up, because a rank was lost", {});
  }
  if (!world->failed() && !handle->given_up && !(handle->error && handle->event)) {
    // PyTorch reuses freed memory on the stream that it was allocated for, which may not be this one.
    const bool elsewhere =
        std::any_of(origins.begin(), origins.end(), [stream](Stream origin) { return origin != stream; });
    if (handle->event && elsewhere && !handle->event->done()) device->keep_until(handle->event, keep);
    keep = py::none();
  }
  if (device) device->release_kept();
  if (handle->error) std::rethrow_exception(handle->error);
}

std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyRequest& what, bool wait,
                                std::vector<Stream> streams) {
  return start(std::move(world), what.request, wait, what.keep, what.device, std::move(streams));
}

std::unique_ptr<PyHandle> start(std::shared_ptr<World> world, const PyExchange& what, std::string name,
                                std::uint64_t round, const PyHandle* after, bool wait) {
  const auto workers = static_cast<std::size_t>(what.exchange->topology->size());
  if (const std::size_t ranks = world->members(what.process_set).size(); ranks != workers) {
    throw UsageError("a topology of " + std::to_string(workers) + " workers cannot serve the " + std::to_string(ranks) +
                     " ranks of process set " + std::to_string(what.process_set));
  }
  Request request;
  request.name = std::move(name);
  request.opcode = Opcode::kExchange;
  request.set = what.process_set;
  request.serving = what.serving;
  request.exchange = what.exchange;
  request.round = round;
  if (after) request.after = after->handle;
  return start(std::move(world), std::move(request), wait, what.keep, what.device);
}

void register_operations(py::module_& module) {
  register_requests(module);
  register_exchanges(module);
  register_handles(module);
}

}  // namespace sordino::bindings
