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

}  // namespace

void register_world(py::module_& module) {
  module.attr("MOST_IN_ONE_SHOT") = OneShotSlots::kMostBytes;  // bytes of a tensor
  auto world =
      py::class_<World, std::shared_ptr<World>>(module, "World", "The ranks of one job, as one of them sees it.");
  world
      .def(
          "submit",
          [](std::shared_ptr<World> self, const PyRequest& what) { return start(std::move(self), what, false); },
          py::arg("what"), "Starts an operation.")
      .def(
          "run", [](std::shared_ptr<World> self, const PyRequest& what) { return start(std::move(self), what, true); },
          py::arg("what"),
          "submit() and wait in one, without waking another thread. Errors are raised by Handle.wait().")
      .def("allreduce_again", &allreduce_again_of, py::arg("tensor_type"), py::arg("dtypes"), py::arg("note_change"),
           "Makes the function that does small all-reduces again (allreduce_again.cc); `dtypes`: the core's codes of "
           "them.")
      .def(
          "exchange",
          [](std::shared_ptr<World> self, const PyExchange& what, std::string name, std::uint64_t round,
             const PyHandle* after,
             bool wait) { return start(std::move(self), what, std::move(name), round, after, wait); },
          py::arg("what"), py::arg("name"), py::arg("round"), py::arg("after").none(true), py::arg("wait"),
          "Starts an exchange, after another operation of this rank if that is given. All ranks of its process set "
          "call "
          "it in the same order.");
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
          "successor",
          [](World& self, const std::string& error) { return self.successor(std::make_exception_ptr(Error(error))); },
          py::arg("error"), py::call_guard<py::gil_scoped_release>(),
          "The world of the ranks that are left. Where this one has not failed, it fails with `error` now.")
      .def_property_readonly("epoch", &World::epoch, "How many worlds there have been before this one.")
      .def_property_readonly("identities", &World::identities, "The ranks that this world's had in the first one.")
      .def_property_readonly("survives_losses", &World::survives_losses, "Whether the ranks go on without those that are lost.")
      .def_property_readonly("awake_seconds", &World::awake_seconds,
                             "Seconds in which this rank ran, since some moment; time in which its process was "
                             "stopped does not count.")
      .def_property_readonly("failed", &World::failed, "Whether every operation of this world raises.")
      .def("shutdown", &World::shutdown, py::arg("cause") = "", py::call_guard<py::gil_scoped_release>(),
           "Leaves the world. Idempotent. `cause`: the error that it leaves in, for the others' errors.")
      .def("abort", &World::abort, py::arg("cause"), py::call_guard<py::gil_scoped_release>(),
           "Tells all other ranks that this one is about to end because of `cause`.")
      .def(
          "start_trace",
          [](World& self, const std::string& path, bool mark_cycles) {
            self.trace().start(path, self.rank(), mark_cycles);
          },
          py::arg("path"), py::arg("mark_cycles") = false)
      .def("stop_trace", [](World& self) { self.trace().stop(); })
      .def("open_ledger", &World::open_ledger, py::arg("opened") = true,
           "Whether this rank counts what a record of it is made of, from now on.")
      .def(
          "keep_spans", [](World& self, bool keep) { self.ledger().keep_spans(keep); }, py::arg("keep"),
          "Whether take_ledger() is to give spans.")
      .def("take_ledger", &take_ledger,
           "Seconds in which operations were under way, bytes sent by rank, the spans since the last time (what, begin "
           "and end on Python's monotonic clock, peer, bytes, name), and how many of them found no room.")
      .def("names_in_flight", &World::names_in_flight)
      .def("tolerate_losses", &World::tolerate_losses, py::call_guard<py::gil_scoped_release>(),
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
        stats["operations_in_one_shot"] = self.traffic().one_shot.load();
        stats["waited_seconds"] = self.waited_seconds();
        return stats;
      });
}

}  // namespace sordino::bindings
