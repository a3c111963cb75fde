// MPI's own life: initialized at most once, finalized at exit if we initialized it and the world has not failed.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"

namespace sordino::mpi {

// Bulk data goes in messages of at most this many bytes. Over TCP Open MPI is told to send each at once: for larger
// ones it would wait for the receiver's consent, which queues behind what is on its way back, so that transfers which
// cross would go one after the other. The price is that Open MPI keeps a copy of what has not left yet.
inline constexpr std::size_t kLargestPart = 128 * 1024;

// Who has failed, as ranks of the communicator; empty where this MPI does not tell.
std::vector<int> failed_in(MPI_Comm comm);

// Throws PeerLost if MPI says that a process failed, with the failed ranks of `comm`; TransportError on other errors.
void check(int code, const char* what, MPI_Comm comm = MPI_COMM_NULL);
// The same of an operation with one peer, whom it concerns.
void check_peer(int code, const char* what, int peer);

// Initializes MPI if nobody has. Throws UsageError when it has been finalized or gives too little thread support.
void ensure_initialized();

// Every rank of MPI_COMM_WORLD has passed initialization: names that only served it can go.
void all_have_attached();

// From now on MPI_Finalize is not called at exit: with dead peers it may wait for ever.
void never_finalize();

// "Open MPI v5.0.11, ..." as the library found at run time says it.
std::string library_version();

}  // namespace sordino::mpi
