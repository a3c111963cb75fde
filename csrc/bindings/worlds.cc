// Worlds, and how ranks come into one.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "engine/world.h"
#include "kernels/kernels.h"
#include "transport/mpi/plugin.h"
#include "transport/sim/sim.h"

namespace sordino::bindings {
namespace {

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

void register_worlds(py::module_& module) {
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
      [](std::optional<int> fortran_handle, std::vector<int> ranks, std::string fingerprint,
         std::function<void(const std::vector<std::string>&)> compare, std::optional<bool> outlast) {
        Config config = Config::from_environment();
        config.outlast = outlast.value_or(config.outlast);
        const mpi::Members members{fortran_handle, std::move(ranks), std::move(fingerprint), std::move(compare)};
        py::gil_scoped_release released;
        return make_world(mpi::open(members, config), config);
      },
      py::arg("fortran_handle") = py::none(), py::arg("ranks") = std::vector<int>{}, py::arg("fingerprint") = "",
      py::arg("compare") = py::none(), py::arg("outlast") = py::none(),
      "The world of an MPI communicator (MPI_COMM_WORLD by default). Collective. Before anything else `compare` is "
      "called with the fingerprints of all its ranks; what it raises ends the call.");
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
