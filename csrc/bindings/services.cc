// Services between ranks besides operations: messages, snapshots that others pull, averages of two ranks.
#include <pybind11/stl.h>

#include <cstring>

#include "bindings/bindings.h"
#include "engine/world.h"
#include "services/mailbox.h"
#include "services/pair_averaging.h"
#include "services/snapshot_store.h"

namespace sordino::bindings {
namespace {

// A service in Python: open until the object is destroyed or closed. `keep` owns memory that it works on.
template <class Service>
struct Open {
  std::shared_ptr<World> world;
  int number;
  std::shared_ptr<Service> service;
  py::object keep = py::none();

  Open(std::shared_ptr<World> world, int number, std::shared_ptr<Service> service, py::object keep = py::none())
      : world(std::move(world)), number(number), service(std::move(service)), keep(std::move(keep)) {
    py::gil_scoped_release released;
    this->world->open_service(number, this->service);
  }
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
  ~Open() { close(); }
  void close() {
    py::gil_scoped_release released;
    world->close_service(number);
  }
};

using OpenMailbox = Open<Mailbox>;
using OpenSnapshotStore = Open<SnapshotStore>;
using OpenPairAveraging = Open<PairAveraging>;

struct PyPull {
  std::shared_ptr<Pull> pull;
};

// Converts seconds of Python's time.monotonic().
Time at(double seconds) {
  constexpr double kFar = 1e9;  // later than the end of any run
  return Time(
      std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, kFar))));
}

template <class Class>
auto& with_close(Class& type) {
  return type.def("close", [](typename Class::type& self) { self.close(); }, "Close the service. Idempotent.");
}

}  // namespace

void register_services(py::module_& module) {
  auto mailbox =
      py::class_<OpenMailbox, std::shared_ptr<OpenMailbox>>(module, "Mailbox", "Small messages to and from ranks.");
  mailbox
      .def(py::init([](std::shared_ptr<World> world, int number) {
             auto service = std::make_shared<Mailbox>(world->service_context(), number);
             return std::make_shared<OpenMailbox>(std::move(world), number, std::move(service));
           }),
           py::arg("world"), py::arg("number"))
      .def(
          "send",
          [](OpenMailbox& self, int to, std::string text) {
            py::gil_scoped_release released;
            self.service->send(to, std::move(text));
          },
          py::arg("to"), py::arg("text"))
      .def(
          "wait",
          [](OpenMailbox& self, double seconds) {
            std::vector<Mailbox::Event> events;
            {
              py::gil_scoped_release released;
              events = self.service->wait(seconds);
            }
            static constexpr const char* kNames[] = {"message", "lost", "done", "nudge"};
            py::list all;
            for (const Mailbox::Event& event : events)
              all.append(py::make_tuple(kNames[static_cast<int>(event.kind)], event.rank, event.text, event.number));
            return all;
          },
          py::arg("seconds"),
          "Wait up to `seconds` for events, and return all: (\"message\", \"lost\", \"done\" or \"nudge\", rank, text, "
          "number) of each.")
      .def(
          "nudge", [](OpenMailbox& self) { self.service->push({Mailbox::Event::Kind::kNudge, -1, {}, 0}); },
          "Wake the thread in wait().");
  with_close(mailbox);

  py::class_<PyPull>(module, "Pull", "A pull of a peer's snapshot.")
      .def_property_readonly("peer", [](const PyPull& self) { return self.pull->peer; })
      .def_property_readonly("number", [](const PyPull& self) { return self.pull->number; })
      .def_property_readonly("state",
                             [](const PyPull& self) {
                               static constexpr const char* kNames[] = {"armed", "under way", "done", "failed"};
                               return kNames[static_cast<int>(self.pull->state.load(std::memory_order_acquire))];
                             })
      .def_property_readonly("failure", [](const PyPull& self) { return self.pull->failure; })
      .def_property_readonly(
          "begun",
          [](const PyPull& self) { return std::chrono::duration<double>(self.pull->begun.time_since_epoch()).count(); })
      .def_property_readonly(
          "seconds",
          [](const PyPull& self) { return std::chrono::duration<double>(self.pull->ended - self.pull->begun).count(); },
          "Duration of the pull, in seconds.")
      .def_property_readonly(
          "version", [](const PyPull& self) { return self.pull->version; },
          "Number of the snapshot: how many its owner had published.")
      .def_property_readonly(
          "steps", [](const PyPull& self) { return self.pull->steps; }, "Steps that its owner gave to publish().")
      .def_property_readonly(
          "age", [](const PyPull& self) { return self.pull->age; },
          "Age of the snapshot, in seconds: when the pull began (within a node), or when it was sent.");

  auto store =
      py::class_<OpenSnapshotStore>(module, "SnapshotStore", "Snapshots of flat memory that other ranks pull.");
  store
      .def(py::init([](std::shared_ptr<World> world, int number, std::shared_ptr<Layout> layout,
                       const std::shared_ptr<OpenMailbox>& mailbox) {
             auto service =
                 std::make_shared<SnapshotStore>(world->service_context(), number, std::move(layout), mailbox->service);
             return std::make_unique<OpenSnapshotStore>(std::move(world), number, std::move(service));
           }),
           py::arg("world"), py::arg("number"), py::arg("layout"), py::arg("mailbox"))
      .def_property_readonly("location",
                             [](const OpenSnapshotStore& self) {
                               const Location& place = self.service->location();
                               return py::bytes(reinterpret_cast<const char*>(&place), sizeof(place));
                             })
      .def(
          "connect",
          [](OpenSnapshotStore& self, int rank, const std::string& bytes) {
            Location location;
            if (bytes.size() != sizeof(location)) throw UsageError("that is not the location of a snapshot store");
            std::memcpy(&location, bytes.data(), sizeof(location));
            self.service->connect(rank, location);
          },
          py::arg("rank"), py::arg("location"), "Set the location of the snapshots of a peer on this node.")
      .def(
          "publish",
          [](OpenSnapshotStore& self, std::uintptr_t source, std::uint64_t steps) {
            py::gil_scoped_release released;
            return self.service->publish(pointer(source), steps);
          },
          py::arg("source"), py::arg("steps"),
          "Publish a copy of the memory. False if all buffers for it are being sent to other ranks.")
      .def(
          "pull",
          [](OpenSnapshotStore& self, int peer, double start) { return PyPull{self.service->pull(peer, at(start))}; },
          py::arg("peer"), py::arg("start"), "Pull from a peer, beginning at the time `start` of time.monotonic().")
      .def(
          "cancel", [](OpenSnapshotStore& self, const PyPull& pull) { self.service->cancel(pull.pull); },
          py::arg("pull"))
      .def(
          "average",
          [](OpenSnapshotStore& self, PyPull& pull, std::uintptr_t values) {
            py::gil_scoped_release released;
            self.service->average(*pull.pull, pointer(values));
          },
          py::arg("pull"), py::arg("values"), "values = (values + pulled) / 2. Possible once per pull.")
      .def(
          "discard", [](OpenSnapshotStore& self, PyPull& pull) { self.service->discard(*pull.pull); }, py::arg("pull"),
          "Release the memory of a pull that is not needed.")
      .def_property_readonly("unpublished", [](const OpenSnapshotStore& self) { return self.service->unpublished(); });
  with_close(store);

  auto averaging = py::class_<OpenPairAveraging>(module, "PairAveraging", "Averages of flat memory with one peer's.");
  averaging
      .def(py::init([](std::shared_ptr<World> world, int number, std::shared_ptr<Layout> layout, std::uintptr_t values,
                       const std::shared_ptr<OpenMailbox>& mailbox, py::object keep) {
             auto service = std::make_shared<PairAveraging>(world->service_context(), number, std::move(layout),
                                                            pointer(values), mailbox->service);
             return std::make_unique<OpenPairAveraging>(std::move(world), number, std::move(service), std::move(keep));
           }),
           py::arg("world"), py::arg("number"), py::arg("layout"), py::arg("values"), py::arg("mailbox"),
           py::arg("keep"))
      .def(
          "begin", [](OpenPairAveraging& self, int peer, std::uint64_t number) { self.service->begin(peer, number); },
          py::arg("peer"), py::arg("number"))
      .def("cancel", [](OpenPairAveraging& self) { self.service->cancel(); })
      .def(
          "lock",
          [](OpenPairAveraging& self) {
            py::gil_scoped_release released;
            self.service->lock();
          },
          "Keep the service from changing the values until unlock().")
      .def("unlock", [](OpenPairAveraging& self) { self.service->unlock(); });
  with_close(averaging);
}

}  // namespace sordino::bindings
