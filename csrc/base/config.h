// Configuration from environment variables. Every variable is one row of a table (config.cc), from which
// docs/configuration.md and the output of `sordino doctor` are generated.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sordino {

struct Config {
  double stall_warn_s = 60;      // seconds of waiting for a rank after which an operation warns
  double timeout_s = 1800;       // seconds of waiting after which it fails with Timeout
  std::size_t fusion_bytes = 0;  // largest message that combines all-reduces, in bytes; 0: never combine
  std::size_t chunk_bytes = 0;   // size of a staging slot, in bytes
  int ranks_per_node = 0;        // ranks of each simulated node; 0: a node is a machine
  bool shared_memory = true;     // node-local averaging through shared memory
  bool survive_losses = false;   // on_peer_lost=continue: the remaining ranks continue after a loss
  std::string transport;         // auto, mpi, ucx or local
  double silence_s = 10;         // seconds of silence after which a rank is lost, if survive_losses
  int spin_us = 0;               // microseconds that a waiting rank spins before it sleeps
  std::string gpu_route;         // only route of operations on device memory, besides host; empty: the best available
  int streaming_stores = -1;     // 1 or 0, for kernels::set_streams(); -1: chosen by the times of copies
  int single_copy = -1;          // 1 or 0: whether node peers copy from private memory; -1: if that is faster
  int cuda_aware = -1;           // 1 or 0: whether MPI accepts device memory; -1: ask MPI
  std::string cpu_level;         // upper limit of the kernels' instruction set level; empty: none
  std::string timeline;          // file of the trace; empty: none
  std::string record;            // folder of the run records; empty: none
  bool inspect = true;           // whether ranks answer `sordino inspect`
  std::string metrics;           // address at which Prometheus reads counters; empty: none
  std::string log_level;         // DEBUG, INFO, WARNING or ERROR; empty: the setting of Python's logging
  std::string nccl;              // file of the NCCL library; "off": do not use NCCL; empty: search for it

  // Reads and checks the environment. Throws UsageError, with the variable and its value, if a value is invalid.
  static Config from_environment();
};

// One documented variable, for docs and doctor.
struct Variable {
  std::string name, alias, fallback, meaning;
};
const std::vector<Variable>& documented_variables();

// Number of ranks that the launcher (mpirun, srun) has started, and the variable that says so. Size 0: no launcher.
struct LauncherHint {
  int size = 0;
  std::string variable;
};
LauncherHint launcher_hint();

}  // namespace sordino
