// Barrier and join: operations that move no data. All members have agreed before they run.
#include "collectives/collective.h"

namespace sordino::collectives {
namespace {

void merge_join(const Announced& announced, Merged& merged) { merged.last_rank = announced.last_rank; }

Task run_join(Operation& operation) {
  for (const Submission& submission : operation.submissions)
    submission.handle->last_rank = operation.decision.merged.last_rank;
  co_return;
}

Recipe recipe(const Request&, const Merged&, const std::vector<int>& ranks, std::size_t me) {
  return {false, me, std::vector<Recipe::Part>(ranks.size()), std::vector<std::size_t>(ranks.size()), 0, 0, {0}, {}};
}

}  // namespace

const Collective kBarrier{
    .name = "barrier", .zeros_stand_in = true, .repeats = true, .recipe = recipe, .run = move_nothing};
const Collective kJoin{.name = "join", .effect = Effect::kJoins, .merge = merge_join, .run = run_join};

}  // namespace sordino::collectives
