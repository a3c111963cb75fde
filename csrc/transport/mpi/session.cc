#include "transport/mpi/session.h"

#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif

#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "transport/mpi/segment_names.h"

#if defined(OMPI_HAVE_MPIX_COMM_GET_FAILED)
#pragma weak MPIX_Comm_get_failed  // not in Open MPI 4, whose ABI is otherwise the same
#endif

namespace sordino::mpi {
namespace {

std::atomic<bool> may_finalize{true};
bool initialized_here = false;
pid_t initialized_by = 0;
SegmentName segment_name;

void finalize_at_exit() {
  if (getpid() != initialized_by) return;  // a forked child
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized || !may_finalize) return;
  segment_name.restore();
  MPI_Finalize();
}

// If a library has made the functions of one MPI global, code built for another MPI calls them, too, with incompatible
// handles.
void require_same_library() {
#if defined(OPEN_MPI)
  constexpr bool kWanted = true;
#else
  constexpr bool kWanted = false;
#endif
  const std::string found = library_version();
  if ((found.find("Open MPI") != std::string::npos) != kWanted) {
    throw TransportError(
        std::string("Sordino loaded its library for ") + (kWanted ? "Open MPI" : "MPICH") +
        ", but the MPI functions belong to \"" + found +
        "\": two MPIs are loaded in this process. Remove one from LD_PRELOAD, or from the modules that the program "
        "imports before Sordino.");
  }
}

}  // namespace

std::vector<int> failed_in([[maybe_unused]] MPI_Comm comm) {
  std::vector<int> ranks;
#if defined(OMPI_HAVE_MPIX_COMM_GET_FAILED)
  if (&MPIX_Comm_get_failed == nullptr) return ranks;
  MPI_Group failed, all;
  if (MPIX_Comm_get_failed(comm, &failed) != MPI_SUCCESS) return ranks;
  int count = 0;
  MPI_Group_size(failed, &count);
  if (count > 0 && MPI_Comm_group(comm, &all) == MPI_SUCCESS) {
    std::vector<int> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    ranks.resize(numbers.size());
    MPI_Group_translate_ranks(failed, count, numbers.data(), all, ranks.data());
    MPI_Group_free(&all);
  }
  MPI_Group_free(&failed);
#endif
  return ranks;
}

namespace {

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank);
  return text;
}

// Throws for an error code; suspects() returns the ranks to blame if a process has failed.
template <class Suspects>
void require(int code, const char* what, Suspects suspects) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  const std::string message = std::string(what) + " failed: " + std::string(text, static_cast<std::size_t>(length));
#if defined(MPIX_ERR_PROC_FAILED)
  int error_class = 0;
  MPI_Error_class(code, &error_class);
  const bool dead = error_class == MPIX_ERR_PROC_FAILED || error_class == MPIX_ERR_PROC_FAILED_PENDING ||
                    error_class == MPIX_ERR_REVOKED;
  if (dead) {
    const std::vector<int> ranks = suspects();
    throw PeerLost((ranks.empty() ? "a process" : list(ranks)) + " is lost, as MPI reports (" + message + ")", ranks);
  }
#endif
  throw TransportError(message);
}

}  // namespace

void check(int code, const char* what, MPI_Comm comm) {
  require(code, what, [comm] { return comm == MPI_COMM_NULL ? std::vector<int>{} : failed_in(comm); });
}

void check_peer(int code, const char* what, int peer) {
  require(code, what, [peer] { return std::vector<int>{peer}; });
}

void ensure_initialized() {
  int finalized = 0;
  check(MPI_Finalized(&finalized), "MPI_Finalized");
  if (finalized) throw UsageError("MPI has been finalized in this process; start a new one");
  int initialized = 0;
  check(MPI_Initialized(&initialized), "MPI_Initialized");
  if (initialized) {
    int level = MPI_THREAD_SINGLE;
    check(MPI_Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_SERIALIZED) {
      throw UsageError(
          "another library or the program initialized MPI without thread support; Sordino needs MPI_THREAD_MULTIPLE. "
          "With mpi4py: leave mpi4py.rc.threads at True.");
    }
    require_same_library();
    return;
  }
  require_same_library();
  // We never create a window, so Open MPI can do without the components for one-sided operations. The one over UCX
  // prints warnings on machines without its network, and the one over libfabric sleeps for a second.
  setenv("OMPI_MCA_osc", "^ucx", 0);
  setenv("OMPI_MCA_btl", "^ofi", 0);
  setenv("OMPI_MCA_btl_tcp_eager_limit", std::to_string(kLargestPart + 4096).c_str(), 0);  // including headers
  int provided = MPI_THREAD_SINGLE;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
  initialized_here = true;
  initialized_by = getpid();
  std::atexit(finalize_at_exit);
  check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  if (provided < MPI_THREAD_SERIALIZED) throw TransportError("this MPI library was built without thread support");
}

void all_have_attached() {
  if (initialized_here) segment_name.hide();
}

void never_finalize() { may_finalize = false; }

std::string library_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(text, &length);
  std::string version(text, static_cast<std::size_t>(length));
  while (!version.empty() && (version.back() == '\0' || version.back() == ' ' || version.back() == '\n'))
    version.pop_back();
  return version;
}

}  // namespace sordino::mpi
