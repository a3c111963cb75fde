// Worlds, operations and handles.
#include "collectives/world.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "collectives/exchange.h"
#include "transport/mpi/plugin.h"
#include "transport/sim/sim.h"

namespace sordino::bindings {
namespace {

// (input address, output address or 0, dtype code, shape)
using TensorTuple = std::tuple<std::uintptr_t, std::uintptr_t, int, std::vector<std::int64_t>>;

// A handle as Python holds it. `keep` are the objects that own the memory under way; if the last reference to an
// unfinished handle goes, or the world has failed, they stay for ever: the bytes may still be read or written.
struct PyHandle {
  std::shared_ptr<World> world;
  std::shared_ptr<Handle> handle;
  py::object keep;
  std::shared_ptr<PyDevice> device;  // whose memory that is, if not the host's

  PyHandle(std::shared_ptr<World> world, std::shared_ptr<Handle> handle, py::object keep,
           std::shared_ptr<PyDevice> device = nullptr)
      : world(std::move(world)), handle(std::move(handle)), keep(std::move(keep)), device(std::move(device)) {}
  PyHandle(const PyHandle&) = delete;
  PyHandle& operator=(const PyHandle&) = delete;
  ~PyHandle() {
    try {
      if (over() && !world->failed()) return;
    } catch (const Error&) {
      // A device that has failed may still read and write.
    }
    keep.release();
  }
  // Nobody works on the memory any more.
  bool over() const { return handle->done() && (!handle->event || handle->event->done()); }
  // On a device, what the caller computes from now on sees the results; its thread waits for peers, not for the device.
  void wait() {
    const Stream stream = device ? device->stream() : 0;
    {
      py::gil_scoped_release released;
      world->wait(*handle);
      if (handle->event && !handle->error) handle->device->wait(stream, handle->event);
    }
    if (handle->undone) world->rethrow();
    if (!world->failed() && !(handle->error && handle->event)) keep = py::none();
    if (handle->error) std::rethrow_exception(handle->error);
  }
};

// What a request must know of the device whose memory its tensors are.
void place(Request& request, const PyDevice* device) {
  if (!device) return;
  request.device = device->device;
  request.ready = device->device->record(device->stream());
}

// Memory of a result; alive as long as anything in Python looks at it.
struct PyResult {
  std::shared_ptr<Handle> handle;
  std::size_t index;
  Result& result() const { return handle->results[index]; }
};

Request make_request(int kind, std::string name, const std::vector<TensorTuple>& tensors, int op, double prescale,
                     double postscale, int root, std::vector<std::int64_t> splits, int set) {
  if (kind < 0 || kind >= static_cast<int>(Kind::kExchange))  // which has a method of its own
    throw UsageError("unknown operation code " + std::to_string(kind));
  if (op < 0 || op > static_cast<int>(ReduceOp::kProduct)) throw UsageError("unknown reduction " + std::to_string(op));
  Request request;
  request.name = std::move(name);
  request.kind = static_cast<Kind>(kind);
  request.set = set;
  request.op = static_cast<ReduceOp>(op);
  request.prescale = prescale;
  request.postscale = postscale;
  request.root = root;
  request.splits = std::move(splits);
  for (const auto& [input, output, dtype, shape] : tensors) {
    request.tensors.push_back({dtype_of(dtype), shape, pointer(input), pointer(output)});
  }
  return request;
}

template <class Start>
auto starter(Start start) {
  return [start](std::shared_ptr<World> world, int kind, std::string name, const std::vector<TensorTuple>& tensors,
                 int op, double prescale, double postscale, int root, std::vector<std::int64_t> splits, int set,
                 py::object keep, std::shared_ptr<PyDevice> device) {
    Request request =
        make_request(kind, std::move(name), tensors, op, prescale, postscale, root, std::move(splits), set);
    place(request, device.get());
    std::shared_ptr<Handle> handle;
    {
      py::gil_scoped_release released;
      handle = start(*world, std::move(request));
    }
    return std::make_unique<PyHandle>(world, std::move(handle), std::move(keep), std::move(device));
  };
}

template <class Class, class Start>
void define_starter(Class& type, const char* name, Start start, const char* doc) {
  type.def(name, starter(start), py::arg("kind"), py::arg("name"), py::arg("tensors"), py::arg("op") = 1,
           py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0,
           py::arg("splits") = std::vector<std::int64_t>{}, py::arg("process_set") = 0, py::arg("keep") = py::none(),
           py::arg("device") = py::none(), doc);
}

std::shared_ptr<World> make_world(std::unique_ptr<Transport> transport, const Config& config) {
  if (!config.cpu_level.empty()) {
    try {
      kernels::set_level(config.cpu_level);
    } catch (const UsageError& error) {
      throw UsageError("SORDINO_CPU_LEVEL='" + config.cpu_level + "': " + error.what());
    }
  }
  return std::make_shared<World>(std::move(transport), config);
}

}  // namespace

void register_world(py::module_& module) {
  py::enum_<Kind>(module, "Kind", py::arithmetic(), "Operation codes of World.submit.")
      .value("ALLREDUCE", Kind::kAllreduce)
      .value("BROADCAST", Kind::kBroadcast)
      .value("ALLGATHER", Kind::kAllgather)
      .value("ALLTOALL", Kind::kAlltoall)
      .value("REDUCESCATTER", Kind::kReducescatter)
      .value("BARRIER", Kind::kBarrier)
      .value("JOIN", Kind::kJoin)
      .value("ADD_SET", Kind::kAddSet)
      .value("REMOVE_SET", Kind::kRemoveSet)
      .value("EXCHANGE", Kind::kExchange);

  py::enum_<Passage>(module, "Passage", "How an exchange of device memory goes.")
      .value("HOST", Passage::kHost)
      .value("DIRECT", Passage::kDirect)
      .value("NCCL", Passage::kNccl);

  py::class_<PyResult>(module, "Result", py::buffer_protocol(), "Memory of a result, as bytes.")
      .def_property_readonly(
          "address", [](const PyResult& self) { return reinterpret_cast<std::uintptr_t>(self.result().data.get()); })
      .def_property_readonly("bytes", [](const PyResult& self) { return self.result().bytes; })
      .def_property_readonly(
          "on_device", [](const PyResult& self) { return self.result().device != nullptr; },
          "Whether it is a device's memory rather than the host's.")
      .def(
          "copied", [](const PyResult& self, const PyDevice& device) { *self.result().reader = device.stream(); },
          py::arg("device"), "What has read it is on the caller's stream, behind which it may go.")
      .def_buffer([](PyResult& self) { return as_bytes(self.result().data.get(), self.result().bytes); })
      .def_property_readonly("shape", [](const PyResult& self) { return self.result().shape; });

  py::class_<Inbox, std::shared_ptr<Inbox>>(module, "Inbox", "Memory for what exchanges receive from other nodes.")
      .def(py::init([](World& world) { return std::make_shared<Inbox>(world.node_memory()); }), py::arg("world"),
           py::keep_alive<1, 2>());

  py::class_<PyHandle>(module, "Handle", "An operation under way.")
      .def("done", &PyHandle::over, "Whether the operation is over; on a device, also that its work there is.")
      .def("wait", &PyHandle::wait, "Waits for the end of the operation; raises what became of it.")
      .def(
          "finish",
          [](PyHandle& self) {
            self.handle->finish();
            self.world->wake();
          },
          "Ends a promise.")
      .def_property_readonly(
          "results",
          [](const PyHandle& self) {
            std::vector<std::unique_ptr<PyResult>> all;
            for (std::size_t index = 0; index < self.handle->results.size(); ++index) {
              all.push_back(std::make_unique<PyResult>(PyResult{self.handle, index}));
            }
            return all;
          },
          "Tensors that the operation made (allgather, alltoall, reducescatter).")
      .def_property_readonly(
          "numbers", [](const PyHandle& self) { return self.handle->numbers; },
          "allgather and alltoall: rows from each member; join: the last rank; add set: its id.");

  auto world =
      py::class_<World, std::shared_ptr<World>>(module, "World", "The ranks of one job, as one of them sees it.");
  define_starter(
      world, "submit", [](World& self, Request request) { return self.submit(std::move(request)); },
      "Starts an operation. `keep` must own the memory of `tensors`: (input, output or 0, dtype, shape) each.");
  define_starter(
      world, "run", [](World& self, Request request) { return self.run(std::move(request)); },
      "submit() and wait in one, without waking another thread. Errors are raised by Handle.wait().");
  world.def(
      "exchange",
      [](std::shared_ptr<World> self, std::string name, int set, std::shared_ptr<Layout> layout,
         std::shared_ptr<topology::Topology> topology, std::uint64_t round, std::uintptr_t source,
         std::uintptr_t result, bool shared, bool without_own, std::shared_ptr<Inbox> inbox, const PyHandle* after,
         bool serving, bool wait, py::object keep, std::shared_ptr<PyDevice> device, Passage passage) {
        if (static_cast<std::size_t>(topology->size()) != self->members(set).size()) {
          throw UsageError("a topology of " + std::to_string(topology->size()) + " workers cannot serve the " +
                           std::to_string(self->members(set).size()) + " ranks of process set " + std::to_string(set));
        }
        Request request;
        request.name = std::move(name);
        request.kind = Kind::kExchange;
        request.set = set;
        request.serving = serving;
        request.exchange = std::make_shared<Exchange>(
            Exchange{std::move(layout), std::move(topology), round, pointer(source), pointer(result), shared, passage,
                     without_own, std::move(inbox), after ? after->handle : nullptr});
        place(request, device.get());
        std::shared_ptr<Handle> handle;
        {
          py::gil_scoped_release released;
          handle = wait ? self->run(std::move(request)) : self->submit(std::move(request));
        }
        return std::make_unique<PyHandle>(std::move(self), std::move(handle), std::move(keep), std::move(device));
      },
      py::arg("name"), py::arg("process_set"), py::arg("layout"), py::arg("topology"), py::arg("round"),
      py::arg("source"), py::arg("result"), py::arg("shared"), py::arg("without_own"), py::arg("inbox"),
      py::arg("after").none(true), py::arg("serving"), py::arg("wait"), py::arg("keep"), py::arg("device") = py::none(),
      py::arg("passage") = Passage::kHost,
      "Starts the mixing of flat memory as a topology says (csrc/collectives/exchange.h), on a process set that is "
      "used "
      "for nothing else. All its ranks call it in the same order.");
  world.def_property_readonly("gpu_operations", &World::routes,
                              "How many operations on GPU memory went which way: NCCL, IPC, MPI, STAGED or ALONE.");
  world.def_property_readonly("rank", &World::rank)
      .def_property_readonly("size", &World::size)
      .def_property_readonly(
          "nodes", [](const World& self) { return self.transport().node_of(); }, "The node number of every rank.")
      .def_property_readonly("transport", [](const World& self) { return self.transport().name(); })
      .def_property_readonly(
          "shares_memory", [](const World& self) { return self.transport().shares_memory(); },
          "Whether ranks of this node can map each other's memory.")
      .def(
          "host", [](const World& self, int rank) { return self.transport().host_of(rank); }, py::arg("rank"))
      .def("members", &World::members, py::arg("process_set"), "The ranks of a process set.")
      .def("sets", &World::sets, "The ids of all process sets.")
      .def(
          "in_shared_memory",
          [](World& self, std::uintptr_t address, std::size_t bytes) {
            return self.in_shared_memory(pointer(address), bytes);
          },
          py::arg("address"), py::arg("bytes"), "Whether node peers can read and write this memory directly.")
      .def(
          "locate",
          [](World& self, std::uintptr_t address, std::size_t bytes) {
            const Location place = self.node_memory().locate(pointer(address), bytes);
            return py::bytes(reinterpret_cast<const char*>(&place), sizeof(place));
          },
          py::arg("address"), py::arg("bytes"), "Where node peers find some memory, for their reaches().")
      .def(
          "reaches",
          [](World& self, int rank, const std::string& told, std::shared_ptr<PyDevice> device) {
            Location place;
            if (told.size() != sizeof(place)) throw UsageError("that is not what locate() gives");
            std::memcpy(&place, told.data(), sizeof(place));
            return self.reaches(rank, place, device_of(device.get()));
          },
          py::arg("rank"), py::arg("place"), py::arg("device"), py::call_guard<py::gil_scoped_release>(),
          "Whether this rank can map what a node peer's locate() gave.")
      .def(
          "can",
          [](const World& self, const PyDevice& device, const std::string& what) {
            const Abilities all = self.abilities(*device.device);
            if (what == "map") return (all & kMapsDevices) != 0;
            if (what == "send") return (all & kSendsDevices) != 0;
            if (what == "nccl") return (all & kNccl) != 0;
            throw UsageError("can() knows 'map', 'send' and 'nccl', not '" + what + "'");
          },
          py::arg("device"), py::arg("what"),
          "Whether node peers may map a device's memory, messages take it, or NCCL does.")
      .def(
          "succeed",
          [](World& self, const std::string& error) { return self.succeed(std::make_exception_ptr(Error(error))); },
          py::arg("error"), py::call_guard<py::gil_scoped_release>(),
          "The world of the ranks that are left. Where this one has not failed, it fails with `error` now.")
      .def_property_readonly("epoch", &World::epoch, "How many worlds there have been before this one.")
      .def_property_readonly("identities", &World::identities, "The ranks that this world's had in the first one.")
      .def_property_readonly("outlasts", &World::outlasts, "Whether the ranks go on without those that are lost.")
      .def_property_readonly("failed", &World::failed, "Whether every operation of this world raises.")
      .def("shutdown", &World::shutdown, py::call_guard<py::gil_scoped_release>(), "Leaves the world. Idempotent.")
      .def("abort", &World::abort, py::arg("cause"), py::call_guard<py::gil_scoped_release>(),
           "Tells all other ranks that this one is about to end because of `cause`.")
      .def(
          "start_trace",
          [](World& self, const std::string& path, bool mark_cycles) {
            self.trace().start(path, self.rank(), mark_cycles);
          },
          py::arg("path"), py::arg("mark_cycles") = false)
      .def("stop_trace", [](World& self) { self.trace().stop(); })
      .def("names_in_flight", &World::names_in_flight)
      .def("outlive_peers", &World::outlive_peers, py::call_guard<py::gil_scoped_release>(),
           "From now on ranks that are lost have left: only operations that need them fail.")
      .def(
          "promise",
          [](std::shared_ptr<World> self) {
            return std::make_unique<PyHandle>(std::move(self), std::make_shared<Handle>(), py::none());
          },
          "A handle that is done when somebody calls its finish(): waiting for it moves messages.")
      .def_property_readonly("stats", [](const World& self) {
        py::dict stats;
        const std::uint64_t inside = self.traffic().inside.load(), across = self.traffic().across.load();
        stats["bytes_sent"] = inside + across;
        stats["bytes_sent_inside_node"] = inside;
        stats["bytes_sent_across_nodes"] = across;
        stats["operations"] = self.traffic().operations.load();
        stats["waited_seconds"] = self.waited_seconds();
        return stats;
      });

  py::class_<sim::Network>(module, "SimNetwork", "What connects ranks that are threads, and how to break it.")
      .def(py::init<const std::vector<int>&>(), py::arg("nodes"), "One rank for each number, which is its node's.")
      .def("kill", &sim::Network::kill, py::arg("rank"), "As if its process were killed.")
      .def("stop", &sim::Network::stop, py::arg("rank"), py::arg("stopped") = true, "It stands still, or goes on.")
      .def("cut", &sim::Network::cut, py::arg("one"), py::arg("other"), py::arg("is_cut") = true,
           "What goes between these two ranks waits until the link is whole again.");
  py::implicitly_convertible<py::list, sim::Network>();
  module.def(
      "sim_worlds",
      [](const sim::Network& network, std::optional<bool> outlast) {
        Config config = Config::from_environment();
        config.outlast = outlast.value_or(config.outlast);
        std::vector<std::shared_ptr<World>> worlds;
        for (auto& transport : network.transports()) worlds.push_back(make_world(std::move(transport), config));
        return worlds;
      },
      py::arg("network"), py::arg("outlast") = py::none(),
      "Connected worlds for threads of this process, one for each rank of a network, or for each node in a list.");
  module.def(
      "mpi_world",
      [](std::optional<int> fortran_handle, std::vector<int> ranks, std::string card,
         std::function<void(const std::vector<std::string>&)> compare, std::optional<bool> outlast) {
        Config config = Config::from_environment();
        config.outlast = outlast.value_or(config.outlast);
        const mpi::Members members{fortran_handle, std::move(ranks), std::move(card), std::move(compare)};
        py::gil_scoped_release released;
        return make_world(mpi::open(members, config), config);
      },
      py::arg("fortran_handle") = py::none(), py::arg("ranks") = std::vector<int>{}, py::arg("card") = "",
      py::arg("compare") = py::none(), py::arg("outlast") = py::none(),
      "The world of an MPI communicator (MPI_COMM_WORLD by default). Collective. Before anything else `compare` is "
      "called with the cards of all its ranks; what it raises ends the call.");
  module.def(
      "outlasts", [] { return Config::from_environment().outlast; },
      "Whether SORDINO_ON_PEER_LOST says that ranks go on without those that are lost.");
  module.def("mpi_initialized", &mpi::initialized, "Whether somebody has initialized MPI in this process.");
  module.def(
      "launcher",
      [] {
        const LauncherHint hint = launcher_hint();
        return std::pair(hint.size, hint.variable);
      },
      "(size, environment variable) that a launcher set for this process; size 0 without one.");
}

}  // namespace sordino::bindings
