#include "base/config.h"

#include <algorithm>
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

double number(const std::string& name, const std::string& value, double least, double most) {
  char* end = nullptr;
  const double parsed = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !(parsed >= least && parsed <= most)) {
    throw UsageError(name + "='" + value + "' is not a number from " + std::to_string(least) + " to " +
                     std::to_string(most) + "; correct it or unset it");
  }
  return parsed;
}

bool one_of(std::string_view value, std::initializer_list<std::string_view> known) {
  return std::find(known.begin(), known.end(), value) != known.end();
}

bool continues(const std::string& name, const std::string& value) {
  if (value != "raise" && value != "continue") {
    throw UsageError(name + "='" + value + "' is neither raise nor continue");
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
        "what becomes of the ranks that are left when one is lost: raise (every operation raises PeerLost) or continue "
        "(they go on without it); init(on_peer_lost=...) comes first"},
       [](Config& c, auto& n, auto& v) { c.survive_losses = continues(n, v); }},
      {{"SORDINO_TRANSPORT", "", "auto",
        "how ranks reach each other: mpi, ucx, local (one machine, shared memory alone), or auto: MPI where its "
        "launcher started them, else local on one machine and UCX between several"},
       [](Config& c, auto& n, auto& v) {
         c.transport = v;
         if (!one_of(v, {"auto", "mpi", "ucx", "local"})) {
           throw UsageError(n + "='" + v + "' is none of auto, mpi, ucx, local");
         }
       }},
      {{"SORDINO_SILENCE_S", "", "10",
        "with on_peer_lost=continue: seconds after which a rank that says nothing (stopped, or cut off) is left out"},
       [](Config& c, auto& n, auto& v) { c.silence_s = number(n, v, 0.05, 1e6); }},
      {{"SORDINO_FUSION_BYTES", "HOROVOD_FUSION_THRESHOLD", "67108864",
        "small all-reduces that are ready together are sent as one up to this many bytes (0: never)"},
       [](Config& c, auto& n, auto& v) { c.fusion_bytes = static_cast<std::size_t>(number(n, v, 0, 1e12)); }},
      {{"SORDINO_CHUNK_BYTES", "", "262144",
        "bytes of one staging chunk when ordinary memory is averaged within a node; four chunks must fit the L2 cache"},
       [](Config& c, auto& n, auto& v) { c.chunk_bytes = static_cast<std::size_t>(number(n, v, 4096, 1 << 26)); }},
      {{"SORDINO_RANKS_PER_NODE", "", "0",
        "cut each machine's ranks into nodes of this size, to try multi-node paths on one machine (0: do not)"},
       [](Config& c, auto& n, auto& v) { c.ranks_per_node = static_cast<int>(number(n, v, 0, 1e6)); }},
      {{"SORDINO_SHARED_MEMORY", "", "1",
        "0 keeps ranks of one machine from averaging in shared memory (everything goes in messages)"},
       [](Config& c, auto& n, auto& v) { c.shared_memory = number(n, v, 0, 1) != 0; }},
      {{"SORDINO_SPIN_US", "", "50",
        "microseconds a waiting rank spins before it sleeps, where ranks do not outnumber cores (else it yields at "
        "once)"},
       [](Config& c, auto& n, auto& v) { c.spin_us = static_cast<int>(number(n, v, 0, 1e6)); }},
      {{"SORDINO_CPU_LEVEL", "", "", "lowers the kernels' instruction set: baseline, avx2 or avx512"},
       [](Config& c, auto&, auto& v) { c.cpu_level = v; }},
      {{"SORDINO_GPU_ROUTE", "", "",
        "limits operations on GPU memory to one way, and through the host what it cannot take: nccl, ipc (within a "
        "node), mpi (a CUDA-aware one) or host; unset: the first of these that all ranks of an operation can take"},
       [](Config& c, auto& n, auto& v) {
         c.gpu_route = v;
         if (!one_of(v, {"", "nccl", "ipc", "mpi", "host"})) {
           throw UsageError(n + "='" + v + "' is none of nccl, ipc, mpi, host");
         }
       }},
      {{"SORDINO_CUDA_AWARE_MPI", "", "", "1 or 0: MPI takes GPU memory, or does not, whatever it says of itself"},
       [](Config& c, auto& n, auto& v) { c.cuda_aware = v.empty() ? -1 : static_cast<int>(number(n, v, 0, 1)); }},
      {{"SORDINO_TIMELINE", "HOROVOD_TIMELINE", "", "file that rank 0 writes a Chrome trace of all operations to"},
       [](Config& c, auto&, auto& v) { c.timeline = v; }},
      {{"SORDINO_RECORD", "", "",
        "folder that each rank writes a record of its run to, for sordino report; init(record=...) comes first"},
       [](Config& c, auto&, auto& v) { c.record = v; }},
      {{"SORDINO_LOG_LEVEL", "", "",
        "least level of log lines: DEBUG, INFO, WARNING or ERROR; init() gives it to the logger sordino. Unset: as "
        "Python's logging is set up, which is WARNING where the script has set nothing"},
       [](Config& c, auto& n, auto& v) {
         c.log_level = v;
         if (!one_of(v, {"", "DEBUG", "INFO", "WARNING", "ERROR"})) {
           throw UsageError(n + "='" + v +
                            "' is not a log level; set it to DEBUG, INFO, WARNING or ERROR, or unset it");
         }
       }},
      {{"SORDINO_NCCL", "", "", "file of the NCCL library to use between GPUs, rather than the one found; off: none"},
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
  // Open MPI, MPICH/Intel MPI (Hydra), Slurm. Slurm comes last: srun sets its variables for every job step, also for
  // one that mpirun then takes over.
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const char* value = std::getenv(name)) return {std::atoi(value), name};
  }
  return {};
}

}  // namespace sordino
