// Control messages between ranks of different nodes: small, buffered, and ordered for each pair. Also handles the
// failure of a process.
#pragma once

#include <mpi.h>

#include <list>
#include <set>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace sordino::mpi {

class Control {
 public:
  explicit Control(MPI_Comm comm);

  void post(int to, Bytes message);
  // Completes pending sends, and delivers received messages to the sink. True if any was delivered.
  bool poll(const Sink& sink);
  bool idle() const { return outgoing_.empty(); }

  // From now on ranks that MPI does not reach are recorded, and cause no exception.
  void tolerate_losses() { tolerates_losses_ = true; }
  std::vector<Loss> take_losses() { return std::exchange(heard_, {}); }

 private:
  struct Outgoing {
    Bytes bytes;
    MPI_Request request = MPI_REQUEST_NULL;
    int to = 0;
  };

  bool fine(int code, const char* what, int peer);
  void lose(int peer);
  bool take(int from, const Sink& sink);

  MPI_Comm comm_;  // freed by MPI_Finalize: freeing it here would have to wait for all ranks
  int rank_ = 0, size_ = 1;
  std::list<Outgoing> outgoing_, graveyard_;  // graveyard_: failed sends, whose memory MPI may still use
  bool tolerates_losses_ = false, one_by_one_ = false;
  std::set<int> lost_;
  std::vector<Loss> heard_;
};

}  // namespace sordino::mpi
