// Link between nodes by MPI: MPI_Isend, MPI_Irecv, and MPI_Test for each request, because MPI_Waitall with a dead peer
// may abort the whole process. It uses no window, and no collective after the meeting, so none can be left half done.
#pragma once

#include <mpi.h>

#include <atomic>
#include <memory>

#include "base/config.h"
#include "transport/link.h"
#include "transport/mpi/control.h"
#include "transport/mpi/mpi_meeting.h"

namespace sordino::mpi {

class MpiLink : public Link {
 public:
  MpiLink(const MpiMeeting& meeting, const Config& config);

  std::string name() const override { return "mpi"; }
  void post(int to, Bytes message) override { control_.post(to, std::move(message)); }
  bool poll(const Sink& sink) override { return control_.poll(sink); }
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override;
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override;
  bool idle() const override { return control_.idle(); }
  bool takes_device_memory() const override { return takes_device_memory_; }
  bool silent_work() const override { return transfers_ != 0; }
  std::vector<Loss> take_losses() override { return control_.take_losses(); }
  void tolerate_losses() override { control_.tolerate_losses(); }
  void abandon() override;
  bool ends_together() const override { return true; }  // MPI_Finalize waits for all

 private:
  MPI_Comm data_;
  Control control_;
  bool takes_device_memory_;
  std::atomic<int> transfers_{0};
};

// True if the MPI library reports that it takes CUDA memory.
bool knows_cuda();

}  // namespace sordino::mpi
