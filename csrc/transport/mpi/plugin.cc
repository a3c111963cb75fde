// Functions that the library of the MPI transport exports.
#include "transport/mpi/plugin.h"

#include <mpi.h>

#include "transport/mpi/mpi_link.h"
#include "transport/mpi/mpi_meeting.h"
#include "transport/mpi/session.h"
#include "transport/process/process_transport.h"
#include "transport/ucx/plugin.h"

namespace sordino::mpi {
namespace {

// Throws if the launcher of another MPI has started several processes, each of which our MPI sees as the only one.
void refuse_to_be_alone(const Members& members, int size) {
  const LauncherHint hint = launcher_hint();
  if (size != 1 || hint.size <= 1 || members.fortran_handle || !members.ranks.empty()) return;
  throw TransportError("a launcher started " + std::to_string(hint.size) + " processes (" + hint.variable +
                       "), but MPI sees one: the launcher belongs to another MPI than the library that was found (" +
                       library_version() + "). Start with `sordino run`, or with the mpirun of that library.");
}

Transport* open_world(const Members& members, const Config& config) {
  ensure_initialized();
  MpiMeeting meeting(members);
  refuse_to_be_alone(members, meeting.size());
  LinkMaker far = [&](Meeting&) { return std::make_unique<MpiLink>(meeting, config); };
  if (config.transport == "ucx") {
    far = [&](Meeting& with) { return ucx::connect(with, config, ""); };
  } else if (config.transport == "local") {
    far = {};
  }
  auto transport = process::meet(meeting, members.comparison, config, far);
  int world_size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  if (meeting.size() == world_size) all_have_attached();
  return transport.release();
}

}  // namespace
}  // namespace sordino::mpi

extern "C" {

__attribute__((visibility("default"))) sordino::Transport* sordino_mpi_open(const sordino::mpi::Members* members,
                                                                            const sordino::Config* config) {
  return sordino::mpi::open_world(*members, *config);
}

__attribute__((visibility("default"))) const char* sordino_mpi_describe() {
  static const std::string version = sordino::mpi::library_version();
  return version.c_str();
}

__attribute__((visibility("default"))) bool sordino_mpi_takes_cuda() { return sordino::mpi::knows_cuda(); }

__attribute__((visibility("default"))) bool sordino_mpi_initialized() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  return initialized != 0;
}
}
