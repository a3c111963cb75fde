#include "transport/mpi/mpi_link.h"

#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "transport/mpi/session.h"

namespace sordino::mpi {
namespace {

// A bulk transfer. Requests are never freed by force: with a failed peer that may abort the process. So an unfinished
// request leaks.
class MpiTransfer : public Transfer {
 public:
  MpiTransfer(int peer, std::vector<MPI_Request> requests, std::atomic<int>& under_way)
      : peer_(peer), requests_(std::move(requests)), under_way_(under_way) {
    ++under_way_;
  }
  ~MpiTransfer() override { --under_way_; }
  bool test() override {
    while (!requests_.empty()) {
      int done = 0;
      check_peer(MPI_Test(&requests_.back(), &done, MPI_STATUS_IGNORE), "MPI_Test", peer_);
      if (!done) return false;
      requests_.pop_back();
    }
    return true;
  }

 private:
  int peer_;
  std::vector<MPI_Request> requests_;
  std::atomic<int>& under_way_;
};

// Calls begin(offset, bytes, request) for each message that these bytes are divided into.
template <class Begin>
std::vector<MPI_Request> in_parts(std::size_t bytes, Begin begin) {
  std::vector<MPI_Request> requests;
  for (std::size_t at = 0; at == 0 || at < bytes; at += kLargestPart)
    begin(at, static_cast<int>(std::min(kLargestPart, bytes - at)), &requests.emplace_back());
  return requests;
}

// MPI guarantees only tags up to 32767; every implementation that we know supports at least 2^27.
void require_tags() {
  int* largest = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &found), "MPI_Comm_get_attr");
  if (!found || *largest < (1 << kTagBits) - 1) {
    throw TransportError("this MPI supports tags up to " + std::to_string(found ? *largest : 32767) + " only; " +
                         "Sordino needs tags up to " + std::to_string((1 << kTagBits) - 1));
  }
}

}  // namespace

// Open MPI, and MPIs derived from it, report at any time whether they take CUDA memory. MPICH does so only after its
// initialization, and ends a process that asks earlier. Other MPIs are assumed not to take it.
bool knows_cuda() {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0 && library_version().find("Open MPI") == std::string::npos) return false;
  using Query = int (*)();
  const auto query = reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "MPIX_Query_cuda_support"));
  return query != nullptr && query() == 1;
}

MpiLink::MpiLink(const MpiMeeting& meeting, const Config& config)
    : data_(meeting.comm()),
      control_(meeting.duplicate()),
      takes_device_memory_(config.cuda_aware < 0 ? knows_cuda() : config.cuda_aware == 1) {
  require_tags();
}

std::unique_ptr<Transfer> MpiLink::send(int to, Tag tag, std::span<const std::byte> data) {
  auto requests = in_parts(data.size(), [&](std::size_t at, int bytes, MPI_Request* request) {
    check_peer(MPI_Isend(data.data() + at, bytes, MPI_BYTE, to, static_cast<int>(tag), data_, request), "MPI_Isend",
               to);
  });
  return std::make_unique<MpiTransfer>(to, std::move(requests), transfers_);
}

std::unique_ptr<Transfer> MpiLink::receive(int from, Tag tag, std::span<std::byte> data) {
  auto requests = in_parts(data.size(), [&](std::size_t at, int bytes, MPI_Request* request) {
    check_peer(MPI_Irecv(data.data() + at, bytes, MPI_BYTE, from, static_cast<int>(tag), data_, request), "MPI_Irecv",
               from);
  });
  return std::make_unique<MpiTransfer>(from, std::move(requests), transfers_);
}

void MpiLink::abandon() { never_finalize(); }

}  // namespace sordino::mpi
