// Layout: the offsets of tensors, the segments that they form, and the hash that tells layouts apart.
#include "arena/layout.h"
#include "check.h"

using sordino::DType;
using sordino::Layout;
using sordino::TensorSpec;

namespace {

std::vector<TensorSpec> tensors(std::vector<std::vector<std::int64_t>> shapes, DType dtype = DType::kFloat32) {
  std::vector<TensorSpec> all;
  for (std::size_t i = 0; i < shapes.size(); ++i) all.push_back({std::to_string(i), dtype, shapes[i]});
  return all;
}

void segments_are_packed_and_aligned() {
  const Layout layout(tensors({{3}, {5, 2}, {}, {0}, {1000}}), 64);
  CHECK(layout.segments().size() == 2);  // 3 + 10 + 1 + 0 floats fit 64 bytes, 1000 do not
  CHECK(layout.offsets()[1] == 12 && layout.offsets()[2] == 52);
  for (const auto& segment : layout.segments()) {
    CHECK(segment.offset % Layout::kAlignment == 0);
    std::size_t end = segment.offset;
    for (std::size_t i = segment.first; i < segment.last; ++i) {
      CHECK(layout.offsets()[i] == end);  // back to back
      end += layout.tensors()[i].bytes();
    }
    CHECK(end == segment.offset + segment.bytes);
  }
  CHECK(layout.segments()[1].bytes == 4000);  // larger than the limit, so it is a segment of its own
  CHECK(layout.bytes() % Layout::kAlignment == 0);
}

void a_segment_has_one_dtype() {
  auto mixed = tensors({{4}, {4}, {4}});
  mixed[1].dtype = DType::kFloat16;
  const Layout layout(mixed, 1 << 20);
  CHECK(layout.segments().size() == 3);
  CHECK(layout.segments()[1].dtype == DType::kFloat16 && layout.segments()[1].bytes == 8);
}

void the_hash_sees_every_difference() {
  const Layout base(tensors({{3}, {5, 2}}), 1 << 20);
  CHECK(base.hash() == Layout(tensors({{3}, {5, 2}}), 7).hash());  // other segments, same model
  CHECK(base.hash() != Layout(tensors({{3}, {2, 5}}), 1 << 20).hash());
  CHECK(base.hash() != Layout(tensors({{3}, {5, 2}}, DType::kFloat64), 1 << 20).hash());
  CHECK(base.hash() != Layout(tensors({{3}}), 1 << 20).hash());
  auto renamed = tensors({{3}, {5, 2}});
  std::swap(renamed[0].name, renamed[1].name);
  CHECK(base.hash() != Layout(renamed, 1 << 20).hash());
}

void names_must_differ() {
  auto doubled = tensors({{3}, {3}});
  doubled[1].name = doubled[0].name;
  CHECK_THROWS(sordino::UsageError, Layout(doubled, 1));
}

}  // namespace

int main() {
  segments_are_packed_and_aligned();
  a_segment_has_one_dtype();
  the_hash_sees_every_difference();
  names_must_differ();
  CHECK(Layout({}, 1).bytes() == 0);
  return sordino::test::report();
}
