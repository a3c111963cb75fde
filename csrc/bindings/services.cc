// What ranks do for each other beside operations: letters, snapshots that others pull, averages of two.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "collectives/letters.h"
#include "collectives/pair_averaging.h"
#include "collectives/shelf.h"
#include "collectives/world.h"

namespace sordino::bindings {
namespace {

// A service as Python holds it: open as long as it is held. `keep` owns memory that it works on.
template <class Kind>
struct Open {
  std::shared_ptr<World> world;
  int number;
  std::shared_ptr<Kind> service;
  py::object keep = py::none();

  Open(std::shared_ptr<World> world, int number, std::shared_ptr<Kind> service, py::object keep = py::none())
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

using OpenLetters = Open<Letters>;
using OpenShelf = Open<Shelf>;
using OpenPairAveraging = Open<PairAveraging>;

struct PyPull {
  std::shared_ptr<Pull> pull;
};

// Seconds of the clock that Python calls time.monotonic().
Time at(double seconds) {
  constexpr double kFar = 1e9;  // what is later than any run
  return Time(
      std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, kFar))));
}

template <class Class>
auto& with_close(Class& type) {
  return type.def("close", [](typename Class::type& self) { self.close(); }, "Answers no more. Idempotent.");
}

}  // namespace

void register_services(py::module_& module) {
  auto letters =
      py::class_<OpenLetters, std::shared_ptr<OpenLetters>>(module, "Letters", "Small messages to and from ranks.");
  letters
      .def(py::init([](std::shared_ptr<World> world, int number) {
             auto service = std::make_shared<Letters>(*world, number);
             return std::make_shared<OpenLetters>(std::move(world), number, std::move(service));
           }),
           py::arg("world"), py::arg("number"))
      .def(
          "send",
          [](OpenLetters& self, int to, std::string text) {
            py::gil_scoped_release released;
            self.service->send(to, std::move(text));
          },
          py::arg("to"), py::arg("text"))
      .def(
          "wait",
          [](OpenLetters& self, double seconds) {
            std::vector<Letters::Event> events;
            {
              py::gil_scoped_release released;
              events = self.service->wait(seconds);
            }
            static constexpr const char* kNames[] = {"letter", "lost", "done", "nudge"};
            py::list told;
            for (const Letters::Event& event : events)
              told.append(py::make_tuple(kNames[static_cast<int>(event.kind)], event.rank, event.text, event.number));
            return told;
          },
          py::arg("seconds"), "What has happened: (\"letter\", \"lost\", \"done\" or \"nudge\", rank, text, number).")
      .def(
          "nudge", [](OpenLetters& self) { self.service->push({Letters::Event::Kind::kNudge, -1, {}, 0}); },
          "Ends a wait.");
  with_close(letters);

  py::class_<PyPull>(module, "Pull", "A snapshot of a peer's that is being pulled, or has been.")
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
          "What it took.")
      .def_property_readonly(
          "version", [](const PyPull& self) { return self.pull->version; }, "How often its owner had published.")
      .def_property_readonly(
          "steps", [](const PyPull& self) { return self.pull->steps; }, "What its owner said when it published.")
      .def_property_readonly(
          "age", [](const PyPull& self) { return self.pull->age; },
          "Seconds since then: when the pull began (within a node), or when it was sent.");

  auto shelf = py::class_<OpenShelf>(module, "Shelf", "Snapshots of flat memory that other ranks pull.");
  shelf
      .def(py::init([](std::shared_ptr<World> world, int number, std::shared_ptr<Layout> layout,
                       const std::shared_ptr<OpenLetters>& letters) {
             auto service = std::make_shared<Shelf>(*world, number, std::move(layout), letters->service);
             return std::make_unique<OpenShelf>(std::move(world), number, std::move(service));
           }),
           py::arg("world"), py::arg("number"), py::arg("layout"), py::arg("letters"))
      .def_property_readonly("location",
                             [](const OpenShelf& self) {
                               const Location& place = self.service->location();
                               return std::tuple(place.segment, place.bytes, place.offset, place.key);
                             })
      .def(
          "meet",
          [](OpenShelf& self, int rank,
             const std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>& location) {
            const auto& [segment, bytes, offset, key] = location;
            self.service->meet(rank, Location{segment, bytes, offset, key});
          },
          py::arg("rank"), py::arg("location"), "Where a peer of this node keeps its snapshots.")
      .def(
          "publish",
          [](OpenShelf& self, std::uintptr_t source, std::uint64_t steps) {
            py::gil_scoped_release released;
            return self.service->publish(pointer(source), steps);
          },
          py::arg("source"), py::arg("steps"),
          "Copies the memory; False if all places for it are on their way to others.")
      .def(
          "pull", [](OpenShelf& self, int peer, double start) { return PyPull{self.service->pull(peer, at(start))}; },
          py::arg("peer"), py::arg("start"), "Pulls from a peer, from a time of time.monotonic() on.")
      .def(
          "cancel", [](OpenShelf& self, const PyPull& pull) { self.service->cancel(pull.pull); }, py::arg("pull"))
      .def(
          "average",
          [](OpenShelf& self, PyPull& pull, std::uintptr_t values) {
            py::gil_scoped_release released;
            self.service->average(*pull.pull, pointer(values));
          },
          py::arg("pull"), py::arg("values"), "values = (values + pulled) / 2; once.")
      .def(
          "discard", [](OpenShelf& self, PyPull& pull) { self.service->discard(*pull.pull); }, py::arg("pull"),
          "Gives back the memory of a pull that is not needed.")
      .def_property_readonly("unpublished", [](const OpenShelf& self) { return self.service->unpublished(); });
  with_close(shelf);

  auto averaging = py::class_<OpenPairAveraging>(module, "PairAveraging", "Averages of flat memory with one peer's.");
  averaging
      .def(py::init([](std::shared_ptr<World> world, int number, std::shared_ptr<Layout> layout, std::uintptr_t values,
                       const std::shared_ptr<OpenLetters>& letters, py::object keep) {
             auto service =
                 std::make_shared<PairAveraging>(*world, number, std::move(layout), pointer(values), letters->service);
             return std::make_unique<OpenPairAveraging>(std::move(world), number, std::move(service), std::move(keep));
           }),
           py::arg("world"), py::arg("number"), py::arg("layout"), py::arg("values"), py::arg("letters"),
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
          "Nothing but the caller changes the values until unlock().")
      .def("unlock", [](OpenPairAveraging& self) { self.service->unlock(); });
  with_close(averaging);
}

}  // namespace sordino::bindings
