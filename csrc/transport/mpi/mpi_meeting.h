// Meeting of the processes of an MPI communicator. Only the meeting uses collectives of MPI.
#pragma once

#include <mpi.h>

#include "transport/meeting.h"
#include "transport/mpi/plugin.h"

namespace sordino::mpi {

class MpiMeeting : public Meeting {
 public:
  explicit MpiMeeting(const Members& members);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<Bytes> gather(Bytes mine) override;
  int host_leader() override;

  MPI_Comm comm() const { return comm_; }
  MPI_Comm duplicate() const;

 private:
  MPI_Comm comm_;  // freed by MPI_Finalize: freeing it here would have to wait for all ranks
  int rank_ = 0, size_ = 1;
};

}  // namespace sordino::mpi
