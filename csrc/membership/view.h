// View: the ranks that form a world from one loss to the next. Epoch 0 has all ranks that were started. The remaining
// ranks agree on each later epoch (consensus.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/wire.h"

namespace sordino::membership {

struct View {
  std::uint32_t epoch = 0;
  std::vector<int> members;  // ranks of epoch 0, in order; the index of a member is its rank in this epoch
  int first_tag = 0;         // first tag of this epoch's process sets, after all tags used before

  bool operator==(const View&) const = default;
  int place_of(int member) const {
    const auto found = std::lower_bound(members.begin(), members.end(), member);
    return found != members.end() && *found == member ? static_cast<int>(found - members.begin()) : -1;
  }
  void write(Writer& writer) const { writer.put(epoch).put(members).put(first_tag); }
  static View read(Reader& reader) {
    View view;
    view.epoch = reader.get<std::uint32_t>();
    view.members = reader.list<int>();
    view.first_tag = reader.get<int>();
    return view;
  }
};

}  // namespace sordino::membership
