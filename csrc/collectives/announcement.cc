#include "collectives/announcement.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "base/runs.h"
#include "collectives/collective.h"

namespace sordino {
namespace {

constexpr std::size_t kMostTensors = 65536;  // of one operation with rows

template <class Number>
std::string text(const std::vector<Number>& numbers) {
  std::string out = "[";
  for (std::size_t i = 0; i < numbers.size(); ++i) out += (i ? ", " : "") + std::to_string(numbers[i]);
  return out + "]";
}

const char* name_of(ReduceOp op) {
  constexpr const char* names[] = {"Average", "Sum", "Adasum", "Min", "Max", "Product"};
  return names[static_cast<int>(op)];
}

bool same_shape(const Collective& what, const std::vector<std::int64_t>& a, const std::vector<std::int64_t>& b) {
  if (!what.rows_may_differ) return a == b;
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

void refuse_unless(bool holds, const char* what) {
  if (!holds) throw TransportError(std::string("a control message names ") + what);
}

template <class Number>
bool not_negative(const std::vector<Number>& numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](Number number) { return number >= 0; });
}

}  // namespace

std::string difference(const Announcement& a, const Announcement& b) {
  const auto differ = [](const std::string& what, const std::string& left, const std::string& right) {
    return what + ": " + left + " against " + right;
  };
  const Collective& what = collective(a.opcode);
  if (a.opcode != b.opcode) return differ("operation", what.name, collective(b.opcode).name);
  if (a.dtypes.size() != b.dtypes.size()) {
    return differ("number of tensors", std::to_string(a.dtypes.size()), std::to_string(b.dtypes.size()));
  }
  for (std::size_t i = 0; i < a.dtypes.size(); ++i) {
    const std::string which = a.dtypes.size() > 1 ? " of tensor " + std::to_string(i) : "";
    if (a.dtypes[i] != b.dtypes[i]) {
      return differ("dtype" + which, std::string(sordino::name_of(a.dtypes[i])),
                    std::string(sordino::name_of(b.dtypes[i])));
    }
    if (!same_shape(what, a.shapes[i], b.shapes[i]))
      return differ("shape" + which, text(a.shapes[i]), text(b.shapes[i]));
  }
  if ((a.device == 0) != (b.device == 0)) {
    const auto where = [](const Announcement& one) { return std::string(one.device == 0 ? "the CPU" : "a GPU"); };
    return differ("device", where(a), where(b));
  }
  if (a.op != b.op) return differ("reduction", name_of(a.op), name_of(b.op));
  if (a.prescale != b.prescale)
    return differ("prescale_factor", std::to_string(a.prescale), std::to_string(b.prescale));
  if (a.postscale != b.postscale)
    return differ("postscale_factor", std::to_string(a.postscale), std::to_string(b.postscale));
  if (a.root != b.root) return differ("root rank", std::to_string(a.root), std::to_string(b.root));
  if (a.set_change.ranks != b.set_change.ranks)
    return differ("ranks", text(a.set_change.ranks), text(b.set_change.ranks));
  if (a.set_change.removed != b.set_change.removed)
    return differ("process set", std::to_string(a.set_change.removed), std::to_string(b.set_change.removed));
  return "";
}

Announcement Announcement::of(const Request& request) {
  Announcement said{request.name,
                    request.opcode,
                    request.op,
                    request.prescale,
                    request.postscale,
                    request.root,
                    {},
                    {},
                    request.splits,
                    request.set_change,
                    {},
                    request.device ? request.device->identity() : 0,
                    0};
  for (const Tensor& tensor : request.tensors) {
    said.dtypes.push_back(tensor.dtype);
    said.shapes.push_back(tensor.shape);
  }
  return said;
}

Announcement Announcement::read(Reader& reader) {
  Announcement said;
  said.name = reader.text();
  said.opcode = reader.one_of(kLastOpcode);
  said.op = reader.one_of(kLastReduceOp);
  said.prescale = reader.get<double>();
  said.postscale = reader.get<double>();
  said.root = reader.get<int>();
  said.dtypes = reader.list<DType>();
  for (std::size_t i = 0; i < said.dtypes.size(); ++i) said.shapes.push_back(reader.list<std::int64_t>());
  said.splits = reader.list<std::int64_t>();
  refuse_unless(said.root >= 0, "a rank that does not exist");
  for (const DType dtype : said.dtypes)
    refuse_unless(static_cast<int>(dtype) < kDTypeCount, "an element type that does not exist");
  for (const auto& shape : said.shapes) {
    refuse_unless(!shape.empty() || !collective(said.opcode).rows_may_differ, "rows of a tensor without dimensions");
    refuse_unless(not_negative(shape), "a negative extent");
  }
  refuse_unless(not_negative(said.splits), "negative splits");
  if (collective(said.opcode).changes_sets()) {
    said.set_change.ranks = reader.list<int>();
    said.set_change.removed = reader.get<int>();
    said.known_sets.newest = reader.get<int>();
    said.known_sets.ids = reader.list<int>();
    refuse_unless(not_negative(said.set_change.ranks), "a negative rank");
    refuse_unless(said.set_change.removed >= 0 && not_negative(said.known_sets.ids), "a negative id");
    refuse_unless(said.known_sets.newest >= 0 && said.known_sets.newest < std::numeric_limits<int>::max(),
                  "an id that does not exist");
  }
  said.device = reader.get<std::uint64_t>();
  said.abilities = reader.get<Abilities>();
  return said;
}

void Announcement::write(Writer& writer) const {
  writer.put(name).put(opcode).put(op).put(prescale).put(postscale).put(root).put(dtypes);
  for (const auto& shape : shapes) writer.put(shape);
  writer.put(splits);
  if (collective(opcode).changes_sets())
    writer.put(set_change.ranks).put(set_change.removed).put(known_sets.newest).put(known_sets.ids);
  writer.put(device).put(abilities);
}

std::size_t Announcement::bytes() const {
  std::size_t total = 0;
  for (std::size_t i = 0; i < dtypes.size(); ++i) {
    total += std::accumulate(
        shapes[i].begin(), shapes[i].end(), size_of(dtypes[i]),
        [](std::size_t product, std::int64_t extent) { return product * static_cast<std::size_t>(extent); });
  }
  return total;
}

Decision Decision::read(Reader& reader, std::size_t members) {
  Decision decision;
  decision.names = reader.list<std::string>();
  decision.verdict = reader.one_of(kLastVerdict);
  decision.error = reader.text();
  decision.lost = reader.list<int>();
  decision.participants = read_runs<int>(reader, members);
  decision.merged.rows = read_runs<std::int64_t>(reader, members * (members + kMostTensors));
  decision.merged.last_rank = reader.get<int>();
  decision.merged.set_id = reader.get<int>();
  decision.abilities = reader.get<Abilities>();
  decision.last = reader.get<int>();
  refuse_unless(!decision.names.empty(), "a decision on no operation");
  refuse_unless(decision.last >= -1, "a rank that does not exist");
  const auto& some = decision.participants;
  refuse_unless(std::adjacent_find(some.begin(), some.end(), std::greater_equal<>()) == some.end(),
                "participants that are not in order");
  return decision;
}

void Decision::write(Writer& writer) const {
  writer.put(names).put(verdict).put(error).put(lost);
  put_runs(writer, participants);
  put_runs(writer, merged.rows);
  writer.put(merged.last_rank).put(merged.set_id).put(abilities).put(last);
}

}  // namespace sordino
