#include "transport/mpi/mpi_meeting.h"

#include <algorithm>

#include "base/error.h"
#include "transport/mpi/session.h"

namespace sordino::mpi {
namespace {

// A rank sends a few hundred bytes. Ranks with another version of Sordino may send anything.
constexpr int kMostBytes = 1 << 16;

MPI_Comm duplicate_of(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}

MPI_Comm choose(const Members& members) {
  if (members.fortran_handle) {
    MPI_Comm given = MPI_Comm_f2c(*members.fortran_handle);
    if (given == MPI_COMM_NULL) throw UsageError("init(comm=...) was given MPI_COMM_NULL");
    return duplicate_of(given);
  }
  if (members.ranks.empty()) return duplicate_of(MPI_COMM_WORLD);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (const int member : members.ranks) {
    if (member < 0 || member >= size) {
      throw UsageError("init(comm=[...]) names rank " + std::to_string(member) + ", but MPI_COMM_WORLD has " +
                       std::to_string(size) + " ranks");
    }
  }
  if (std::find(members.ranks.begin(), members.ranks.end(), rank) == members.ranks.end()) {
    throw UsageError("rank " + std::to_string(rank) + " is not among the ranks given to init(comm=[...])");
  }
  MPI_Group world, group;
  check(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  check(MPI_Group_incl(world, static_cast<int>(members.ranks.size()), members.ranks.data(), &group), "MPI_Group_incl");
  MPI_Comm comm = MPI_COMM_NULL;
  check(MPI_Comm_create_group(MPI_COMM_WORLD, group, 0, &comm), "MPI_Comm_create_group");
  MPI_Group_free(&group);
  MPI_Group_free(&world);
  check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

}  // namespace

MpiMeeting::MpiMeeting(const Members& members) : comm_(choose(members)) {
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

MPI_Comm MpiMeeting::duplicate() const { return duplicate_of(comm_); }

std::vector<Bytes> MpiMeeting::gather(Bytes mine) {
  const int length = static_cast<int>(std::min<std::size_t>(mine.size(), kMostBytes + 1));
  std::vector<int> lengths(static_cast<std::size_t>(size_));
  check(MPI_Allgather(&length, 1, MPI_INT, lengths.data(), 1, MPI_INT, comm_), "MPI_Allgather");
  const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
  if (*least < 0 || *most > kMostBytes) {
    throw TransportError("the ranks use different message formats: one announces " +
                         std::to_string(*least < 0 ? *least : *most) + " bytes, but the limit is " +
                         std::to_string(kMostBytes) + ". Install the same version of Sordino on all nodes.");
  }
  const auto room = static_cast<std::size_t>(*most);
  mine.resize(room);
  Bytes all(room * lengths.size());
  check(MPI_Allgather(mine.data(), *most, MPI_BYTE, all.data(), *most, MPI_BYTE, comm_), "MPI_Allgather");
  std::vector<Bytes> shown;
  for (const int one : lengths) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(shown.size() * room);
    shown.emplace_back(begin, begin + one);
  }
  return shown;
}

int MpiMeeting::host_leader() {
  MPI_Comm node = MPI_COMM_NULL;
  check(MPI_Comm_split_type(comm_, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &node), "MPI_Comm_split_type");
  int leader = rank_;
  check(MPI_Bcast(&leader, 1, MPI_INT, 0, node), "MPI_Bcast");
  MPI_Comm_free(&node);
  return leader;
}

}  // namespace sordino::mpi
