#include "arena/layout.h"

#include <algorithm>
#include <unordered_set>

namespace sordino {
namespace {

std::size_t align(std::size_t offset) {
  return (offset + Layout::kAlignment - 1) / Layout::kAlignment * Layout::kAlignment;
}

// FNV-1a, a hash that is the same on every machine.
struct Fnv {
  std::uint64_t state = 14695981039346656037ull;
  void add(std::string_view text) {
    for (const char c : text) {
      state = (state ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    }
    state = (state ^ 0xff) * 1099511628211ull;  // so that "ab","c" differs from "a","bc"
  }
};

}  // namespace

std::size_t TensorSpec::count() const { return count_of(shape); }

Layout::Layout(std::vector<TensorSpec> tensors, std::size_t segment_bytes) : tensors_(std::move(tensors)) {
  place([&](const LayoutSegment& segment,
            std::size_t tensor) { return segment.bytes + tensors_[tensor].bytes() <= segment_bytes; },
        [](std::size_t) { return std::size_t{0}; });
}

Layout::Layout(std::vector<TensorSpec> tensors, const std::vector<std::size_t>& groups) : tensors_(std::move(tensors)) {
  if (groups.size() != tensors_.size() || !std::is_sorted(groups.begin(), groups.end())) {
    throw UsageError("a layout of " + std::to_string(tensors_.size()) +
                     " tensors needs a group for each, in rising order");
  }
  place([&](const LayoutSegment& segment, std::size_t tensor) { return segment.group == groups[tensor]; },
        [&](std::size_t tensor) { return groups[tensor]; });
}

Layout Layout::of_parts(std::vector<LayoutSegment> parts, std::size_t bytes) {
  std::size_t group = 0;
  for (const LayoutSegment& part : parts) {
    if (part.offset > bytes || part.bytes > bytes - part.offset || part.group < group) {
      throw UsageError("part at byte " + std::to_string(part.offset) + " with " + std::to_string(part.bytes) +
                       " bytes: parts lie within the arena's " + std::to_string(bytes) + " bytes, in rising groups");
    }
    group = part.group;
  }
  Layout layout;
  layout.segments_ = std::move(parts);
  layout.bytes_ = bytes;
  return layout;
}

void Layout::place(const std::function<bool(const LayoutSegment&, std::size_t tensor)>& joins,
                   const std::function<std::size_t(std::size_t tensor)>& group_of) {
  std::unordered_set<std::string_view> names;
  for (std::size_t index = 0; index < tensors_.size(); ++index) {
    const TensorSpec& tensor = tensors_[index];
    if (!names.insert(tensor.name).second)
      throw UsageError("two tensors of one layout are named '" + tensor.name + "'");
    const bool same = !segments_.empty() && segments_.back().dtype == tensor.dtype && joins(segments_.back(), index);
    const std::size_t offset = same ? bytes_ : align(bytes_);
    if (!same) segments_.push_back({index, index, offset, 0, tensor.dtype, group_of(index)});
    LayoutSegment& segment = segments_.back();
    offsets_.push_back(offset);
    bytes_ = offset + tensor.bytes();
    segment.last = index + 1;
    segment.bytes = bytes_ - segment.offset;
  }
  bytes_ = align(bytes_);
  Fnv fnv;
  for (const std::string& line : describe()) fnv.add(line);
  for (std::size_t index = 0; index < tensors_.size(); ++index) fnv.add(std::to_string(group_of(index)));
  hash_ = fnv.state;
}

std::vector<std::string> Layout::describe() const {
  std::vector<std::string> lines;
  for (const TensorSpec& tensor : tensors_) {
    std::string line = tensor.name + " " + std::string(name_of(tensor.dtype)) + " [";
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis)
      line += (axis ? ", " : "") + std::to_string(tensor.shape[axis]);
    lines.push_back(line + "]");
  }
  return lines;
}

}  // namespace sordino
