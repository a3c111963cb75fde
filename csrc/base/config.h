// The only reader of the environment. Every variable is one row of one table (config.cc), from which
// docs/configuration.md and `sordino doctor` are made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sordino {

struct Config {
  double stall_warn_s = 60;      // warn when an operation has waited this long for a rank
  double timeout_s = 1800;       // fail it after this long
  std::size_t fusion_bytes = 0;  // set from the table's default
  std::size_t chunk_bytes = 0;   // of a slot of the node-local path
  int ranks_per_node = 0;        // 0 = as the machine says; 1 = treat every rank as a node of its own
  bool shared_memory = true;     // node-local averaging through shared memory
  bool outlast = false;          // whether the ranks go on without those that are lost
  std::string transport;         // how ranks reach each other: auto, mpi, ucx, local
  double silence_s = 10;         // after which a rank that says nothing is lost, if they do
  int spin_us = 0;               // how long a waiting rank spins before it sleeps
  std::string gpu_route;         // which way operations on device memory go; empty: the best there is
  int cuda_aware = -1;           // whether MPI takes device memory; -1: ask it
  std::string cpu_level;         // lowers the kernels' instruction set level
  std::string timeline;          // file that the trace is written to from init on
  std::string record;            // folder that each rank writes its record to
  std::string log_level;         // DEBUG, INFO, WARNING or ERROR; empty: as Python's logging is set up
  std::string nccl;              // file of the NCCL library; "off": none

  // Reads and checks the environment; throws UsageError naming the variable and the value.
  static Config from_environment();
};

// One documented variable, for docs and doctor.
struct Variable {
  std::string name, alias, fallback, meaning;
};
const std::vector<Variable>& documented_variables();

// What a launcher (mpirun, srun) says of this process; size 0 when there is no launcher.
struct LauncherHint {
  int size = 0;
  std::string variable;
};
LauncherHint launcher_hint();

}  // namespace sordino
