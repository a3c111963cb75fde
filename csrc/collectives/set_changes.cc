// Addition and removal of process sets by all members of their parent. The id of an added set is new to all members.
// Its messages have tags that no other set of a member has.
#include <algorithm>
#include <set>

#include "collectives/collective.h"

namespace sordino::collectives {
namespace {

std::string complain_of_many(const Announcement& said, std::size_t) {
  const std::size_t sets = said.known_sets.ids.size();
  if (sets < static_cast<std::size_t>(kTagSets) / 2) return "";
  return "has " + std::to_string(sets) + " process sets already, which is the limit. Remove some";
}

// The coordinator may have assigned ids to sets that members have yet to make.
void merge_id(const Announced& announced, Merged& merged) {
  std::set<int> taken;
  int id = announced.given.newest;
  for (const Announcement* said : announced.all) {
    id = std::max(id, said->known_sets.newest);
    for (const int set : said->known_sets.ids) taken.insert(tag_set_of(set));
  }
  do ++id;
  while (taken.contains(tag_set_of(id)));
  merged.set_id = announced.given.newest = id;
}

bool is_id(const Request&, const Merged& merged, std::size_t, std::size_t) { return merged.set_id > 0; }

Task tell_id(Operation& operation) {
  operation.submissions.front().handle->set_id = operation.decision.merged.set_id;
  co_return;
}

}  // namespace

const Collective kAddSet{
    .name = "add_process_set",
    .effect = Effect::kAddsSet,
    .complaint = complain_of_many,
    .merge = merge_id,
    .fits = is_id,
    .run = tell_id,
};
const Collective kRemoveSet{.name = "remove_process_set", .effect = Effect::kRemovesSet, .run = move_nothing};

}  // namespace sordino::collectives
