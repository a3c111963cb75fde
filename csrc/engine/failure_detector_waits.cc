// List of the waits that FailureDetector::watch() checks against deadlines.
#include "engine/failure_detector.h"
#include "engine/telling.h"

namespace sordino {
namespace {

std::string quoted(const std::string& name) { return "'" + name + "'"; }

}  // namespace

std::vector<Wait> FailureDetector::waits(AwakeTime now) {
  using Stage = Wait::Stage;
  std::vector<Wait> all;
  for (const auto& [id, set] : scheduler_.sets()) {
    if (set->running) {
      const Running& running = *set->running;
      all.push_back({Stage::kRunning, quoted(running.decision.names.front()), seconds(running.awaited_since, now),
                     running.participants->laggards()});
    }
    if (set->entered) {
      const ProcessSet::InTurn& entered = *set->entered;
      Wait wait{Stage::kCalled,
                quoted(entered.name.empty() ? entered.repeat->name : entered.name),
                seconds(entered.awaited_since, now),
                {}};
      for (const int member : set->one_shot()->missing())
        wait.ranks.push_back(set->ranks[static_cast<std::size_t>(member)]);
      all.push_back(std::move(wait));
    }
    if (!set->negotiation) continue;
    for (const Negotiation::Waiting& waiting : set->negotiation->waiting())
      all.push_back({Stage::kCalled, quoted(waiting.name), seconds(waiting.since, now), waiting.missing});
  }
  scheduler_.visit_announced([&](const Submission& submission, const ProcessSet& set) {
    const bool in_turn = set.entered && set.entered->name == submission.request.name;
    if (set.running || !set.decisions.empty() || set.negotiation || in_turn) return;
    all.push_back({Stage::kUndecided,
                   quoted(submission.request.name),
                   seconds(submission.awaited_since, now),
                   {set.coordinator()}});
  });
  scheduler_.device_in_flight().visit(now, [&](const std::string& name, double waited, std::vector<int> late) {
    all.push_back({Stage::kOnDevice, quoted(name), waited, std::move(late)});
  });
  messages_.visit([&](const Posting& call, const std::vector<int>& missing) {
    all.push_back({Stage::kMessage, call.text(), seconds(call.since, now), missing});
  });
  return all;
}

}  // namespace sordino
