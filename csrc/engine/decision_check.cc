#include "engine/decision_check.h"

#include <algorithm>
#include <limits>
#include <span>

namespace sordino {

void check_decision(const ProcessSet& set, const Decision& decision, const std::vector<Submission>& submissions,
                    const std::function<bool(int)>& is_free) {
  const auto refuse_unless = [&](bool holds) {
    if (!holds) throw TransportError("the decision on '" + decision.names.front() + "' does not fit the request");
  };
  const Request& first = submissions.front().request;
  const std::size_t parts = decision.participants.size();
  const auto& numbers = decision.numbers;
  const bool zeros_stand_in = first.opcode == Opcode::kAllreduce || first.opcode == Opcode::kBarrier;
  refuse_unless(zeros_stand_in || parts == set.ranks.size());
  for (const Submission& other : submissions) {
    const Request& next = other.request;
    refuse_unless(submissions.size() == 1 ||
                  (next.opcode == Opcode::kAllreduce && next.op == first.op && next.device == first.device));
  }
  // So much of a tensor that the sum of all participants' bytes is still a number.
  const auto rows_fit = [&](const Tensor& tensor, std::span<const std::int64_t> rows) {
    constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
    const auto most = kMost / rows.size() / std::max<std::size_t>(tensor.row_bytes(), 1);
    return std::all_of(rows.begin(), rows.end(),
                       [&](std::int64_t count) { return static_cast<std::uint64_t>(count) <= most; });
  };
  const auto me = static_cast<std::size_t>(
      std::find(decision.participants.begin(), decision.participants.end(), set.me) - decision.participants.begin());
  switch (first.opcode) {
    case Opcode::kAllgather:
      refuse_unless(numbers.size() == first.tensors.size() * parts);
      for (std::size_t index = 0; index < first.tensors.size(); ++index) {
        const Tensor& tensor = first.tensors[index];
        const std::span rows(numbers.data() + index * parts, parts);
        refuse_unless(rows_fit(tensor, rows) && rows[me] == tensor.shape[0]);
      }
      break;
    case Opcode::kAlltoall:
      refuse_unless(numbers.size() == parts * parts && rows_fit(first.tensors[0], numbers) &&
                    std::equal(first.splits.begin(), first.splits.end(), numbers.begin() + me * parts));
      break;
    case Opcode::kJoin: refuse_unless(numbers.size() == 1); break;
    case Opcode::kAddSet:
      refuse_unless(numbers.size() == 1 && numbers[0] > 0 && numbers[0] <= std::numeric_limits<int>::max());
      // Coordinators do not know what another gives at the same time.
      if (!is_free(static_cast<int>(numbers[0]))) {
        throw TransportError(
            "process sets whose parents have different first ranks were added at once, and both got id " +
            std::to_string(numbers[0]) + ". Add them one after the other");
      }
      break;
    default: break;
  }
}

}  // namespace sordino
