// Session of MPI: initialized at most once, and finalized at exit if we have initialized it and no world has failed.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"

namespace sordino::mpi {

// Bulk data is sent in messages of at most this many bytes. Over TCP, Open MPI is configured to send each at once. For
// larger messages it would wait for the receiver's consent. The consent queues behind data in the opposite direction,
// so transfers in opposite directions would run one after the other. The price: Open MPI keeps a copy of data that has
// not left yet.
inline constexpr std::size_t kLargestPart = 128 * 1024;

// Failed ranks of the communicator; empty if this MPI does not report them.
std::vector<int> failed_in(MPI_Comm comm);

// Throws PeerLost if MPI reports a failed process, with the failed ranks of `comm`; TransportError for other errors.
void check(int code, const char* what, MPI_Comm comm = MPI_COMM_NULL);
// The same for an operation with one peer, which is to blame.
void check_peer(int code, const char* what, int peer);

// Initializes MPI unless it is already initialized. Throws UsageError if it has been finalized, or has too little
// thread support.
void ensure_initialized();

// Call this once every rank of MPI_COMM_WORLD is initialized. Removes names of files that only the initialization
// needed (segment_names.h).
void all_have_attached();

// From now on MPI_Finalize is not called at exit, because with dead peers it may wait forever.
void never_finalize();

// "Open MPI v5.0.11, ...", as reported by the library found at run time.
std::string library_version();

}  // namespace sordino::mpi
