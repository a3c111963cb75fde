// Layout: the offsets of tensors in flat memory. Each rank computes it without memory or messages. Ranks with the same
// tensors get the same layout, which has a 64-bit hash for comparison.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace sordino {

struct TensorSpec {
  std::string name;
  DType dtype;
  std::vector<std::int64_t> shape;

  std::size_t count() const;
  std::size_t bytes() const { return count() * size_of(dtype); }
};

// Neighboring tensors of one dtype that are exchanged together.
struct LayoutSegment {
  std::size_t first, last;    // tensors [first, last), in layout order
  std::size_t offset, bytes;  // in the arena, in bytes
  DType dtype;
  std::size_t group = 0;  // the caller's number; segments of different dtypes may share one
};

class Layout {
 public:
  static constexpr std::size_t kAlignment = 64;  // of segments, in bytes; a segment has no gaps between tensors

  // Places tensors in the given order. A new segment begins where the dtype changes, and where the segment would exceed
  // `segment_bytes`. A larger tensor is a segment of its own. Throws UsageError for duplicate names.
  Layout(std::vector<TensorSpec> tensors, std::size_t segment_bytes);
  // The same, but a new segment begins where the group or the dtype changes. groups[i] is the group of tensor i. Throws
  // UsageError if names are duplicate, groups decrease, or their number is not that of the tensors.
  Layout(std::vector<TensorSpec> tensors, const std::vector<std::size_t>& groups);

  // A layout without tensors: its segments are parts of an arena of `bytes` bytes, at the given offsets. Throws
  // UsageError if a part exceeds the arena, or groups decrease.
  static Layout of_parts(std::vector<LayoutSegment> parts, std::size_t bytes);

  const std::vector<TensorSpec>& tensors() const { return tensors_; }
  const std::vector<std::size_t>& offsets() const { return offsets_; }
  const std::vector<LayoutSegment>& segments() const { return segments_; }
  std::size_t bytes() const { return bytes_; }
  // Of the tensors and their groups. It does not depend on `segment_bytes`.
  std::uint64_t hash() const { return hash_; }
  // One line per tensor, for finding the first difference between two ranks.
  std::vector<std::string> describe() const;

 private:
  Layout() = default;
  void place(const std::function<bool(const LayoutSegment&, std::size_t tensor)>& joins,
             const std::function<std::size_t(std::size_t tensor)>& group_of);

  std::vector<TensorSpec> tensors_;
  std::vector<std::size_t> offsets_;
  std::vector<LayoutSegment> segments_;
  std::size_t bytes_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace sordino
