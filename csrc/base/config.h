// Configuration: the only reader of the environment. Every variable is one row of a table (config.cc), from which
// docs/configuration.md and `sordino doctor` are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sordino {

struct Config {
  double stall_warn_s = 60;      // seconds of waiting for a rank after which an operation warns
  double timeout_s = 1800;       // seconds after which it fails
  std::size_t fusion_bytes = 0;  // set from the table's default
  std::size_t chunk_bytes = 0;   // bytes of a slot of the node-local path
  int ranks_per_node = 0;        // 0: as the machine gives it; 1: every rank is a node of its own
  bool shared_memory = true;     // node-local averaging through shared memory
  bool survive_losses = false;   // whether the ranks survive losses
  std::string transport;         // how ranks reach each other: auto, mpi, ucx, local
  double silence_s = 10;         // seconds of silence after which a rank is lost, if ranks survive losses
  int spin_us = 0;               // microseconds that a waiting rank spins before it sleeps
  std::string gpu_route;         // route of operations on device memory; empty: the best available
  int streaming_stores = -1;     // kernels::set_streams; -1: by the times of copies
  int cuda_aware = -1;           // whether MPI takes device memory; -1: ask MPI
  std::string cpu_level;         // lowers the kernels' instruction set level
  std::string timeline;          // file for the trace, written from init on
  std::string record;            // folder for each rank's record
  bool inspect = true;           // whether ranks answer `sordino inspect`
  std::string metrics;           // address for Prometheus
  std::string log_level;         // DEBUG, INFO, WARNING or ERROR; empty: the setting of Python's logging
  std::string nccl;              // file of the NCCL library; "off": none

  // Reads and checks the environment; throws UsageError naming the variable and the value.
  static Config from_environment();
};

// One documented variable, for docs and doctor.
struct Variable {
  std::string name, alias, fallback, meaning;
};
const std::vector<Variable>& documented_variables();

// The launcher's (mpirun, srun) data about this process. Size 0: no launcher.
struct LauncherHint {
  int size = 0;
  std::string variable;
};
LauncherHint launcher_hint();

}  // namespace sordino
