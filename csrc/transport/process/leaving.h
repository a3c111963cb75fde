// The end of a process's part in a world, and the end of the process.
//
// Peers on this machine may want to map memory of this process after it has left their world. So a world's memory stays
// until all of them have left that world, too, and a process that ends first waits until the others have come to their
// end or are gone. (MPI_Finalize waits likewise.) Each process shows both on a board, a page of shared memory that its
// peers map: whether it has come to its end, and the number below which it has left all of its worlds.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "transport/location.h"
#include "transport/node_memory.h"

namespace sordino::process {

struct Peer;

// This process's part in one world.
class Presence {
 public:
  Presence();
  Presence(const Presence&) = delete;
  ~Presence();  // Leaves the world. Kept segments are freed once all peers have left it as well.

  // Place of this process's board; one for all its worlds. Throws TransportError if there is no shared memory.
  static Location board();
  // Number of this world among the worlds of this process.
  std::uint64_t number() const { return number_; }
  // Notes that the process `peer` of this machine may map memory of this one. `number`: its number of this world.
  void share_with(pid_t peer, const Location& board, std::uint64_t number);
  // Keeps a segment until no peer can want to map it any more.
  void keep(std::shared_ptr<Segment> segment) { kept_.push_back(std::move(segment)); }

 private:
  const std::uint64_t number_;
  std::vector<std::pair<std::shared_ptr<Peer>, std::uint64_t>> peers_;
  std::vector<std::shared_ptr<Segment>> kept_;
};

// Makes this process wait at its end for the end of `peer`, for at most `most_s` s. Call it after share_with().
void will_wait_for(pid_t peer, double most_s);
// Cancels the waits for all peers so far: ranks have been lost, or the others have continued without this process.
void will_not_wait();

}  // namespace sordino::process
