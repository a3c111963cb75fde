#include "base/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string_view>

#include "base/error.h"

namespace sordino {
namespace {

struct Row {
  Variable doc;
  std::function<void(Config&, const std::string& name, const std::string& value)> read;
};

// Throws UsageError unless the value is a number from `least` to `most`, without a fraction if `whole`.
double number(const std::string& name, const std::string& value, double least, double most, bool whole = false) {
  double parsed = 0;  // not by strtod, which expects the locale's decimal point
  const std::string_view text = std::string_view(value).substr(std::min(value.find_first_not_of(" +"), value.size()));
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, parsed);
  if (problem != std::errc() || end != last || !(parsed >= least && parsed <= most) ||
      (whole && parsed != std::floor(parsed))) {
    char range[64];
    std::snprintf(range, sizeof range, "%.15g to %.15g", least, most);
    throw UsageError(name + "='" + value + "' is not a " + (whole ? "whole " : "") + "number from " + range +
                     "; correct it or unset it");
  }
  return parsed;
}

template <class T>
T integer(const std::string& name, const std::string& value, double least, double most) {
  return static_cast<T>(number(name, value, least, most, true));
}

bool on(const std::string& name, const std::string& value) { return integer<int>(name, value, 0, 1) != 0; }

bool one_of(std::string_view value, std::initializer_list<std::string_view> known) {
  return std::find(known.begin(), known.end(), value) != known.end();
}

bool continues(const std::string& name, const std::string& value) {
  if (value != "raise" && value != "continue") {
    throw UsageError(name + "='" + value + "' is not valid; set it to raise or continue");
  }
  return value == "continue";
}

const std::vector<Row>& rows() {
  static const std::vector<Row> table = {
      {{"SORDINO_STALL_WARN_S", "HOROVOD_STALL_CHECK_TIME_SECONDS", "60",
        "seconds after which an operation that waits for a rank is reported, with the names of both"},
       [](Config& c, auto& n, auto& v) { c.stall_warn_s = number(n, v, 0.001, 1e9); }},
      {{"SORDINO_TIMEOUT_S", "", "1800", "seconds after which such an operation fails with Timeout on every rank"},
       [](Config& c, auto& n, auto& v) { c.timeout_s = number(n, v, 0.001, 1e9); }},
      {{"SORDINO_ON_PEER_LOST", "", "raise",
        "behavior of the remaining ranks when a rank is lost: raise (every operation raises PeerLost) or continue "
        "(they continue without it); init(on_peer_lost=...) takes precedence"},
       [](Config& c, auto& n, auto& v) { c.survive_losses = continues(n, v); }},
      {{"SORDINO_TRANSPORT", "", "auto",
        "transport between ranks: mpi, ucx, local (one machine, shared memory only), or auto: MPI if an MPI launcher "
        "started the ranks, else local on one machine and UCX between several"},
       [](Config& c, auto& n, auto& v) {
         c.transport = v;
         if (!one_of(v, {"auto", "mpi", "ucx", "local"})) {
           throw UsageError(n + "='" + v + "' is not a transport; set it to auto, mpi, ucx or local");
         }
       }},
      {{"SORDINO_SILENCE_S", "", "10",
        "with on_peer_lost=continue: seconds after which a silent rank (stopped, or cut off) is excluded"},
       [](Config& c, auto& n, auto& v) { c.silence_s = number(n, v, 0.05, 1e6); }},
      {{"SORDINO_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD", "67108864",
        "largest size, in bytes, of one message that combines small all-reduces that are ready together (0: never "
        "combine)"},
       [](Config& c, auto& n, auto& v) { c.fusion_bytes = integer<std::size_t>(n, v, 0, 1e12); }},
      {{"SORDINO_CHUNK_BYTES", "", "262144",
        "size, in bytes, of a staging chunk when ordinary memory is averaged within a node; four chunks must fit the "
        "L2 cache"},
       [](Config& c, auto& n, auto& v) { c.chunk_bytes = integer<std::size_t>(n, v, 4096, 1 << 26); }},
      {{"SORDINO_RANKS_PER_NODE", "", "0",
        "ranks per simulated node: divides each machine's ranks into nodes, to try multi-node paths on one machine "
        "(0: off)"},
       [](Config& c, auto& n, auto& v) { c.ranks_per_node = integer<int>(n, v, 0, 1e6); }},
      {{"SORDINO_SHARED_MEMORY", "", "1",
        "1 or 0: ranks of one machine average in shared memory, or send everything in messages"},
       [](Config& c, auto& n, auto& v) { c.shared_memory = on(n, v); }},
      {{"SORDINO_SPIN_US", "", "50",
        "microseconds that a waiting rank spins before it sleeps, if ranks do not outnumber the cores that they share "
        "(else it yields at once)"},
       [](Config& c, auto& n, auto& v) { c.spin_us = integer<int>(n, v, 0, 1e6); }},
      {{"SORDINO_CPU_LEVEL", "", "", "upper limit of the kernels' instruction set: baseline, avx2 or avx512"},
       [](Config& c, auto&, auto& v) { c.cpu_level = v; }},
      {{"SORDINO_STREAMING_STORES", "", "",
        "1 or 0: data for other ranks of the node always, or never, bypass the caches (on x86-64 only); unset: if "
        "ordinary stores are slow, as they are between sockets"},
       [](Config& c, auto& n, auto& v) { c.streaming_stores = v.empty() ? -1 : integer<int>(n, v, 0, 1); }},
      {{"SORDINO_SINGLE_COPY", "", "",
        "1 or 0: node peers always, or never, copy large data from each other's private memory (process_vm_readv) "
        "instead of passing them through shared memory; unset: if the kernel permits it, and it is faster"},
       [](Config& c, auto& n, auto& v) { c.single_copy = v.empty() ? -1 : integer<int>(n, v, 0, 1); }},
      {{"SORDINO_GPU_ROUTE", "", "",
        "only route for operations on GPU memory: nccl, ipc (within a node), mpi (a CUDA-aware one) or host; it falls "
        "back to host; unset: the first of these that all ranks of an operation support"},
       [](Config& c, auto& n, auto& v) {
         c.gpu_route = v;
         if (!one_of(v, {"", "nccl", "ipc", "mpi", "host"})) {
           throw UsageError(n + "='" + v + "' is not a route; set it to nccl, ipc, mpi or host");
         }
       }},
      {{"SORDINO_CUDA_AWARE_MPI", "", "", "1 or 0: MPI accepts GPU memory, or does not; overrides what MPI reports"},
       [](Config& c, auto& n, auto& v) { c.cuda_aware = v.empty() ? -1 : integer<int>(n, v, 0, 1); }},
      {{"SORDINO_TIMELINE", "HOROVOD_TIMELINE", "", "file for a Chrome trace of all operations, written by rank 0"},
       [](Config& c, auto&, auto& v) { c.timeline = v; }},
      {{"SORDINO_RECORD", "", "",
        "folder for the run records of all ranks, for sordino report; init(record=...) takes precedence"},
       [](Config& c, auto&, auto& v) { c.record = v; }},
      {{"SORDINO_INSPECT", "", "1", "1 or 0: ranks answer sordino inspect, or do not"},
       [](Config& c, auto& n, auto& v) { c.inspect = on(n, v); }},
      {{"SORDINO_METRICS", "", "",
        "address, such as 127.0.0.1:9400, at which each rank serves its counters to Prometheus; a rank adds its local "
        "rank to the port (needs the package prometheus_client)"},
       [](Config& c, auto&, auto& v) { c.metrics = v; }},
      {{"SORDINO_LOG_LEVEL", "", "",
        "lowest level of log lines: DEBUG, INFO, WARNING or ERROR; init() sets it on the logger sordino. Unset: the "
        "level of Python's logging, which is WARNING unless the script changes it"},
       [](Config& c, auto& n, auto& v) {
         c.log_level = v;
         if (!one_of(v, {"", "DEBUG", "INFO", "WARNING", "ERROR"})) {
           throw UsageError(n + "='" + v +
                            "' is not a log level; set it to DEBUG, INFO, WARNING or ERROR, or unset it");
         }
       }},
      {{"SORDINO_NCCL", "", "", "file of the NCCL library to use between GPUs, instead of the one found; off: none"},
       [](Config& c, auto&, auto& v) { c.nccl = v; }},
  };
  return table;
}

}  // namespace

Config Config::from_environment() {
  Config config;
  for (const Row& row : rows()) {
    std::string name = row.doc.name;
    const char* value = std::getenv(name.c_str());
    if (value == nullptr && !row.doc.alias.empty()) {
      name = row.doc.alias;
      value = std::getenv(name.c_str());
    }
    if (value == nullptr) {
      name = row.doc.name;
      value = row.doc.fallback.c_str();
    }
    row.read(config, name, value);
  }
  return config;
}

const std::vector<Variable>& documented_variables() {
  static const std::vector<Variable> variables = [] {
    std::vector<Variable> all;
    for (const Row& row : rows()) all.push_back(row.doc);
    return all;
  }();
  return variables;
}

LauncherHint launcher_hint() {
  // Open MPI, MPICH/Intel MPI (Hydra), Slurm. Slurm comes last: srun sets its variables for every job step, even if
  // mpirun starts the ranks in that step.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const char* value = std::getenv(name)) return {std::atoi(value), name};
  }
  return {};
}

}  // namespace sordino
