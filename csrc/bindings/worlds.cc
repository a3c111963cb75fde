// Creation of worlds, and how ranks join one.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include "base/cores.h"
#include "bindings/bindings.h"
#include "engine/world.h"
#include "kernels/kernels.h"
#include "kernels/publish.h"
#include "transport/mpi/plugin.h"
#include "transport/process/leaving.h"
#include "transport/process/machine.h"
#include "transport/process/process_transport.h"
#include "transport/sim/sim.h"
#include "transport/ucx/plugin.h"

namespace sordino::bindings {
namespace {

// Lets Python handle pending signals, as it does between two instructions: Ctrl-C raises KeyboardInterrupt from a
// waiting operation. Python handles signals in the main thread only.
void handle_signals() {
  if (gettid() != getpid()) return;
  const py::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<World> make_world(std::unique_ptr<Transport> transport, const Config& config) {
  if (!config.cpu_level.empty()) {
    try {
      kernels::set_level(config.cpu_level);
    } catch (const UsageError& error) {
      throw UsageError("SORDINO_CPU_LEVEL='" + config.cpu_level + "': " + error.what());
    }
  }
  kernels::set_streams(config.streaming_stores < 0 ? std::nullopt : std::optional(config.streaming_stores != 0));
  auto world = std::make_shared<World>(std::move(transport), config);
  world->on_wait(handle_signals);
  return world;
}

// Meeting of processes in Python: through a torch store, or at the launcher.
class PythonMeeting : public Meeting {
 public:
  using Gather = std::function<std::vector<py::bytes>(py::bytes)>;

  PythonMeeting(int rank, int size, Gather gather) : rank_(rank), size_(size), gather_(std::move(gather)) {}
  ~PythonMeeting() override {
    py::gil_scoped_acquire held;
    gather_ = nullptr;
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<Bytes> gather(Bytes mine) override {
    py::gil_scoped_acquire held;
    std::vector<Bytes> shown;
    for (const py::bytes& one : gather_(py::bytes(reinterpret_cast<const char*>(mine.data()), mine.size()))) {
      const std::string_view text(one);
      const auto* data = reinterpret_cast<const std::byte*>(text.data());
      shown.emplace_back(data, data + text.size());
    }
    if (static_cast<int>(shown.size()) != size_) throw UsageError("gather() must return a value for each rank");
    return shown;
  }

 private:
  const int rank_, size_;
  Gather gather_;
};

Config config_for(std::optional<bool> survive_losses) {
  Config config = Config::from_environment();
  config.survive_losses = survive_losses.value_or(config.survive_losses);
  return config;
}

}  // namespace

void register_worlds(py::module_& module) {
  py::class_<sim::Network>(module, "SimNetwork", "Network between ranks that are threads, for tests of failures.")
      .def(py::init<const std::vector<int>&>(), py::arg("nodes"), "nodes: the node number of each rank.")
      .def("kill", &sim::Network::kill, py::arg("rank"), "Simulate that the process of a rank is killed.")
      .def("stop", &sim::Network::stop, py::arg("rank"), py::arg("stopped") = true, "Suspend a rank, or resume it.")
      .def("cut", &sim::Network::cut, py::arg("one"), py::arg("other"), py::arg("is_cut") = true,
           "Hold back all messages between two ranks, or deliver them.")
      .def(
          "sent",
          [](const sim::Network& self) {
            std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
            for (const auto& [messages, bytes] : self.sent()) all.emplace_back(messages, bytes);
            return all;
          },
          "(messages, bytes) that each rank has sent, but not through shared memory.");
  py::implicitly_convertible<py::list, sim::Network>();
  module.def(
      "sim_worlds",
      [](const sim::Network& network, std::optional<bool> survive_losses) {
        const Config config = config_for(survive_losses);
        std::vector<std::shared_ptr<World>> worlds;
        for (auto& transport : network.transports()) worlds.push_back(make_world(std::move(transport), config));
        return worlds;
      },
      py::arg("network"), py::arg("survive_losses") = py::none(),
      "Connected worlds for threads of this process, one for each rank of a network or of a list of node numbers.");
  module.def(
      "mpi_world",
      [](std::optional<int> fortran_handle, std::vector<int> ranks, std::string fingerprint,
         std::function<void(const std::vector<std::string>&)> compare, std::optional<bool> survive_losses) {
        const Config config = config_for(survive_losses);
        const mpi::Members members{fortran_handle, std::move(ranks), {std::move(fingerprint), std::move(compare)}};
        py::gil_scoped_release released;
        return make_world(mpi::open(members, config), config);
      },
      py::arg("fortran_handle") = py::none(), py::arg("ranks") = std::vector<int>{}, py::arg("fingerprint") = "",
      py::arg("compare") = py::none(), py::arg("survive_losses") = py::none(),
      "The world of an MPI communicator (MPI_COMM_WORLD by default). Collective. `compare` is called first, with the "
      "fingerprints of all its ranks; an error that it raises ends the call.");
  module.def(
      "end_alone", &process::will_not_wait,
      "Lets this process end without waiting for the other ranks of its machine: they map none of its memory any "
      "more.");
  module.def(
      "process_world",
      [](int rank, int size, PythonMeeting::Gather gather, std::string fingerprint,
         std::function<void(const std::vector<std::string>&)> compare, bool by_ucx, const std::string& token,
         std::optional<bool> survive_losses) {
        const Config config = config_for(survive_losses);
        const Comparison comparison{std::move(fingerprint), std::move(compare)};
        PythonMeeting meeting(rank, size, std::move(gather));
        LinkMaker far;
        if (by_ucx) far = [&](Meeting& with) { return ucx::connect(with, config, token); };
        py::gil_scoped_release released;
        return make_world(process::meet(meeting, comparison, config, far), config);
      },
      py::arg("rank"), py::arg("size"), py::arg("gather"), py::arg("fingerprint") = "", py::arg("compare") = py::none(),
      py::arg("by_ucx") = false, py::arg("token") = "", py::arg("survive_losses") = py::none(),
      "The world of processes that meet by `gather`, which sends its argument to all ranks and returns all "
      "arguments, by rank. Collective. by_ucx: UCX reaches other nodes; otherwise all ranks must be on one machine. "
      "`compare`: as in mpi_world.");
  module.def("machine", &process::machine,
             "Name of this boot of the machine and of its process namespace, equal for ranks that may share memory.");
  module.def("host_name", &host_name, "The name of this host.");
  module.def("hint_ucx", &ucx::hint, py::arg("folder"), "Set the folder of the libraries of UCX's wheel.");
  module.def(
      "survives_losses", [] { return Config::from_environment().survive_losses; },
      "Whether SORDINO_ON_PEER_LOST is `continue`: ranks continue without lost ranks.");
  module.def(
      "transport", [] { return Config::from_environment().transport; },
      "The transport in SORDINO_TRANSPORT: auto, mpi, ucx or local.");
  module.def(
      "inspection",
      [] {
        const Config config = Config::from_environment();
        return std::pair(config.inspect, config.metrics);
      },
      "Whether ranks answer `sordino inspect`, and the address for Prometheus.");
  module.def(
      "record_folder", [] { return Config::from_environment().record; },
      "The folder for run records, from SORDINO_RECORD; empty if it is not set.");
  module.def(
      "deadlines",
      [] {
        const Config config = Config::from_environment();
        return std::pair(config.timeout_s, config.stall_warn_s);
      },
      "Seconds after which a waiting operation fails (SORDINO_TIMEOUT_S), and is reported (SORDINO_STALL_WARN_S).");
  module.def("mpi_initialized", &mpi::initialized, "Whether MPI has been initialized in this process.");
  module.def(
      "launcher",
      [] {
        const LauncherHint hint = launcher_hint();
        return std::pair(hint.size, hint.variable);
      },
      "(size, environment variable) that a launcher set for this process; size 0 without one.");
}

}  // namespace sordino::bindings
