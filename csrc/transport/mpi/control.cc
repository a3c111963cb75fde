#include "transport/mpi/control.h"

#include <iterator>

#include "transport/mpi/session.h"

namespace sordino::mpi {
namespace {

constexpr int kTag = 1;

}  // namespace

Control::Control(MPI_Comm comm) : comm_(comm) {
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

void Control::post(int to, Bytes message) {
  if (lost_.contains(to)) return;
  Outgoing& one = outgoing_.emplace_back();
  one.bytes = std::move(message);
  one.to = to;
  if (!fine(MPI_Isend(one.bytes.data(), static_cast<int>(one.bytes.size()), MPI_BYTE, to, kTag, comm_, &one.request),
            "MPI_Isend", to)) {
    graveyard_.splice(graveyard_.end(), outgoing_, std::prev(outgoing_.end()));
  }
}

bool Control::poll(const Sink& sink) {
  // Tests every message: a stopped rank does not receive its messages, but the other ranks receive theirs.
  for (auto one = outgoing_.begin(); one != outgoing_.end();) {
    int sent = 0;
    const auto next = std::next(one);
    if (!fine(MPI_Test(&one->request, &sent, MPI_STATUS_IGNORE), "MPI_Test", one->to)) {
      graveyard_.splice(graveyard_.end(), outgoing_, one);
    } else if (sent) {
      outgoing_.erase(one);
    }
    one = next;
  }
  bool moved = false;
  if (one_by_one_) {
    for (int peer = 0; peer < size_; ++peer) {
      while (peer != rank_ && !lost_.contains(peer) && take(peer, sink)) moved = true;
    }
  } else {
    while (take(MPI_ANY_SOURCE, sink)) moved = true;
  }
  return moved;
}

// Returns whether an MPI call with a peer succeeded. If losses are tolerated, records any error as the loss of the
// peer; otherwise throws.
bool Control::fine(int code, const char* what, int peer) {
  if (code == MPI_SUCCESS) return true;
  if (!tolerates_losses_) check_peer(code, what, peer);
  lose(peer);
  return false;
}

void Control::lose(int peer) {
  if (lost_.insert(peer).second) heard_.push_back({peer, "MPI can no longer reach it", false});
}

// Delivers the next message of `from`, which may be MPI_ANY_SOURCE, to the sink. Returns false if no message has come.
bool Control::take(int from, const Sink& sink) {
  int waiting = 0;
  MPI_Status status;
  const int code = MPI_Iprobe(from, kTag, comm_, &waiting, &status);
  if (code != MPI_SUCCESS && tolerates_losses_) {
    // Once a process has failed, MPI refuses MPI_ANY_SOURCE.
    for (const int peer : failed_in(comm_)) lose(peer);
    if (from != MPI_ANY_SOURCE) lose(from);
    one_by_one_ = true;
    return false;
  }
  check(code, "MPI_Iprobe", comm_);
  if (!waiting) return false;
  int bytes = 0;
  check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
  Bytes message(static_cast<std::size_t>(bytes));
  if (!fine(MPI_Recv(message.data(), bytes, MPI_BYTE, status.MPI_SOURCE, kTag, comm_, MPI_STATUS_IGNORE), "MPI_Recv",
            status.MPI_SOURCE)) {
    return false;
  }
  sink(status.MPI_SOURCE, message);
  return true;
}

}  // namespace sordino::mpi
