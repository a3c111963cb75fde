// All-reduce by messages, if no two ranks share memory, or if the memory is a device's.
#include <algorithm>
#include <utility>

#include "collectives/flat.h"
#include "collectives/operations.h"
#include "collectives/team_allreduce.h"

namespace sordino {
namespace {

// Reduces the parts of one lane, one after the other.
Task along_lane(Participants& participants, const TeamAllreduce& team, std::span<std::byte> vector, std::size_t width,
                TeamAllreduce::Cut cut, std::size_t lane) {
  const std::size_t count = vector.size() / width;
  const auto received = participants.compute->scratch(team.room(std::min(count, cut.most)));
  co_await participants.compute->idle();
  for (std::size_t begin = lane * cut.most; begin < count; begin += cut.lanes * cut.most) {
    co_await team.run(vector.data() + begin * width, std::min(cut.most, count - begin), received.get(),
                      static_cast<Tag>(lane));
  }
}

}  // namespace

Task allreduce_messages(Participants& participants, Pieces& pieces, ReduceOp op, double pre, double post) {
  const DType dtype = pieces.dtype();
  Flat flat(*participants.compute, pieces);
  co_await flat.begin(pre);
  const TeamAllreduce team(Team::whole(participants), dtype, op, post, TeamAllreduce::is_small(pieces.bytes()));
  const TeamAllreduce::Cut cut = TeamAllreduce::cut(pieces.count(), dtype, participants.size(), 1);
  std::vector<Task> lanes;
  for (std::size_t lane = 0; lane < cut.lanes; ++lane) {
    lanes.push_back(along_lane(participants, team, std::span(flat.data(), pieces.bytes()), size_of(dtype), cut, lane));
  }
  co_await together(std::move(lanes));
  co_await flat.finish(1);
}

}  // namespace sordino
