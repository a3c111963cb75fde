// End of a rank that MPI does not know, on a machine with other ranks. Peers may still want to map its memory, which
// lives only as long as its process. So a process that ends normally first waits until the others have come to their
// end too, or are gone. (MPI_Finalize waits likewise.)
#pragma once

#include <sys/types.h>

#include <memory>

#include "transport/location.h"
#include "transport/node_memory.h"

namespace sordino::process {

// Keeps a segment until the process ends.
void keep_until_the_end(std::shared_ptr<Segment> segment);

// Location of a flag that shows peers whether this process has come to its end. One for all worlds of the process.
Location own_board();
// Makes this process wait at its end for the end of `peer`, for at most `most_s` seconds. The peer is a process of this
// machine that shares memory with this one.
void will_wait_for(pid_t peer, const Location& board, double most_s);
// This process waits for no peer: ranks have been lost, or the others have gone on without it.
void will_not_wait();

}  // namespace sordino::process
