// The end of a rank that MPI does not know, on a machine that it shares with others: what they may still want to map of
// its memory lives as long as its process, so a process that ends in peace waits until they have come to their end as
// well, or are gone. (MPI_Finalize waits likewise.)
#pragma once

#include <sys/types.h>

#include <memory>

#include "transport/location.h"
#include "transport/node_memory.h"

namespace sordino::process {

// Keeps a segment until the process ends.
void keep_until_the_end(std::shared_ptr<Segment> segment);

// Where peers see whether this process has come to its end; the same for all worlds that it is in.
Location own_board();
// A process of this machine that shares memory with this one, for whose end this one's will wait, at most so many
// seconds.
void will_wait_for(pid_t peer, const Location& board, double most_s);
// Ranks have been lost, so that this process waits for nobody.
void will_not_wait();

}  // namespace sordino::process
