// A world and its properties.
#include "engine/world.h"

#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/device.h"
#include "bindings/operations.h"

namespace sordino::bindings {
namespace {

py::tuple take_ledger(World& self) {
  const Ledger::Taken taken = self.ledger().take(std::chrono::steady_clock::now());
  constexpr const char* kNames[] = {"wait", "meet", "move", "pull", "average"};
  const auto seconds = [](Time time) { return std::chrono::duration<double>(time.time_since_epoch()).count(); };
  py::list spans;
  for (const Ledger::Span& span : taken.spans) {
    spans.append(py::make_tuple(kNames[static_cast<int>(span.what)], seconds(span.begin), seconds(span.end), span.peer,
                                span.bytes, span.name));
  }
  return py::make_tuple(taken.seconds, self.traffic().by_rank(), std::move(spans), taken.dropped);
}

py::object waits_of(World& self, double limit_s) {
  constexpr const char* kStages[] = {"called", "undecided", "running", "on the GPU", "message"};
  std::optional<std::vector<Wait>> waits;
  {
    const py::gil_scoped_release released;
    waits = self.waits(std::chrono::milliseconds(static_cast<long long>(limit_s * 1000)));
  }
  if (!waits) return py::none();
  py::list all;
  for (const Wait& wait : *waits)
    all.append(py::make_tuple(kStages[static_cast<int>(wait.stage)], wait.what, wait.seconds, wait.ranks));
  return all;
}

}  // namespace

void register_world(py::module_& module) {
  auto world = py::class_<World, std::shared_ptr<World>>(module, "World", "One rank's view of the connected ranks.");
  world
      .def(
          "submit",
          [](std::shared_ptr<World> self, const PyRequest& what, std::vector<Stream> streams) {
            return start(std::move(self), what, false, std::move(streams));
          },
          py::arg("what"), py::arg("streams") = std::vector<Stream>{},
          "Start an operation. On a device, it waits for the work that the current stream and `streams` have now.")
      .def(
          "run", [](std::shared_ptr<World> self, const PyRequest& what) { return start(std::move(self), what, true); },
          py::arg("what"), "Submit, and return when the operation has ended. Call Handle.wait() to raise its error.")
      .def("repeating", &repeat_of, py::arg("tensor_type"), py::arg("dtypes"), py::arg("note_change"),
           py::arg("in_flight"), py::arg("number"),
           "Create the function that repeats operations (repeat.cc). dtypes: the core's code of each. number: from a "
           "label, None and a process set, returns the next name of an unnamed operation.")
      .def("messages", &messages_of, py::arg("tensor_type"), py::arg("dtypes"), py::arg("note_change"),
           "Create the function that sends and receives (point_to_point.cc). dtypes: the core's code of each.")
      .def(
          "exchange",
          [](std::shared_ptr<World> self, const PyExchange& what, std::string name, std::uint64_t round,
             const PyHandle* after,
             bool wait) { return start(std::move(self), what, std::move(name), round, after, wait); },
          py::arg("what"), py::arg("name"), py::arg("round"), py::arg("after").none(true), py::arg("wait"),
          "Start an exchange, after another operation of this rank if one is given. All ranks of its process set must "
          "start exchanges in the same order.");
  world.def_property_readonly("gpu_operations", &World::routes,
                              "Number of operations on GPU memory, by route: NCCL, IPC, MPI, STAGED or ALONE.");
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
      .def(
          "process", [](const World& self, int rank) { return self.transport().process_of(rank); }, py::arg("rank"),
          "Process id of a rank on its host.")
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
          py::arg("address"), py::arg("bytes"), "Location of some memory, for reaches() of the node peers.")
      .def(
          "reaches",
          [](World& self, int rank, const std::string& bytes, std::shared_ptr<PyDevice> device) {
            Location place;
            if (bytes.size() != sizeof(place)) throw UsageError("place must be a value that locate() returned");
            std::memcpy(&place, bytes.data(), sizeof(place));
            return self.reaches(rank, place, device_of(device.get()));
          },
          py::arg("rank"), py::arg("place"), py::arg("device"), py::call_guard<py::gil_scoped_release>(),
          "Whether this rank can map the memory that a node peer's locate() returned.")
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
          "Whether node peers can map the device's memory ('map'), messages can carry it ('send'), or NCCL can "
          "('nccl').")
      .def(
          "successor",
          [](World& self, const std::string& error) { return self.successor(std::make_exception_ptr(Error(error))); },
          py::arg("error"), py::call_guard<py::gil_scoped_release>(),
          "The world of the remaining ranks. If this world has not failed yet, it fails with `error` now.")
      .def_property_readonly("epoch", &World::epoch, "Number of worlds before this one.")
      .def_property_readonly("identities", &World::identities,
                             "The rank in the first world of each rank of this world.")
      .def_property_readonly("survives_losses", &World::survives_losses,
                             "Whether the ranks continue without lost ranks.")
      .def_property_readonly("awake_seconds", &World::awake_seconds,
                             "Clock of this rank, in seconds, which does not count the time in which its process was "
                             "stopped.")
      .def_property_readonly("failed", &World::failed, "Whether every operation of this world raises.")
      .def("shutdown", &World::shutdown, py::arg("cause") = "", py::arg("lost") = std::vector<int>{},
           py::call_guard<py::gil_scoped_release>(),
           "Leave the world. Idempotent. `cause`: the error because of which it leaves, and the ranks that this error "
           "calls lost, for the errors of other ranks.")
      .def("set_timeout", &World::set_timeout, py::arg("process_set"), py::arg("seconds"),
           py::call_guard<py::gil_scoped_release>(),
           "Set the timeout of this rank's operations on a process set, in seconds, instead of SORDINO_TIMEOUT_S.")
      .def("abort", &World::abort, py::arg("cause"), py::arg("lost") = std::vector<int>{},
           py::call_guard<py::gil_scoped_release>(),
           "Tell all other ranks that this rank is about to end because of `cause`, or because ranks are lost.")
      .def(
          "start_trace",
          [](World& self, const std::string& path, bool mark_cycles) {
            self.trace().start(path, self.rank(), mark_cycles);
          },
          py::arg("path"), py::arg("mark_cycles") = false)
      .def("start_trace_of_settings", &World::start_trace_of_settings,
           "Start the trace of SORDINO_TIMELINE, if it is set and this is rank 0.")
      .def(
          "take_over_trace", [](World& self, World& other) { self.trace().take_over(other.trace()); }, py::arg("other"),
          "Continue the trace of another world of this rank, if one runs there.")
      .def("stop_trace", [](World& self) { self.trace().stop(); })
      .def("open_ledger", &World::open_ledger, py::arg("opened") = true,
           "From now on, count the quantities for this rank's run record, or stop counting.")
      .def(
          "keep_spans", [](World& self, bool keep) { self.ledger().keep_spans(keep); }, py::arg("keep"),
          "From now on, keep spans for take_ledger(), or not.")
      .def(
          "take_ledger", &take_ledger,
          "Seconds in which operations were in flight; bytes sent, by rank; the spans since the last call (kind, begin "
          "and end on Python's monotonic clock, peer, bytes, name); and the number of spans that were dropped.")
      .def("names_in_flight", &World::names_in_flight)
      .def("waits", &waits_of, py::arg("limit_s"),
           "The operations of this rank that are not over: stage (as in engine/waits.h), name, seconds, and the ranks "
           "that hold it up. None if no thread of this process moves operations within limit_s.")
      .def("tolerate_losses", &World::tolerate_losses, py::call_guard<py::gil_scoped_release>(),
           "From now on, treat lost ranks as ranks that have left: only operations that need them fail.")
      .def(
          "promise",
          [](std::shared_ptr<World> self) {
            return std::make_unique<PyHandle>(std::move(self), std::make_shared<Handle>(), py::none());
          },
          "A handle without an operation, which is done once its finish() is called. A thread that waits for it polls "
          "the world.")
      .def_property_readonly("stats", [](const World& self) {
        py::dict stats;
        const std::uint64_t inside = self.traffic().inside.load(), across = self.traffic().across.load();
        stats["bytes_sent"] = inside + across;
        stats["bytes_sent_inside_node"] = inside;
        stats["bytes_sent_across_nodes"] = across;
        stats["operations"] = self.traffic().operations.load();
        stats["operations_in_one_shot"] = self.traffic().one_shot.load();
        stats["waited_seconds"] = self.waited_seconds();
        return stats;
      });
}

}  // namespace sordino::bindings
