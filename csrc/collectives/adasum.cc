// Adasum (Maleki et al. 2020) along a binary tree of ranks, by messages.
#include "collectives/flat.h"
#include "collectives/operations.h"
#include "collectives/recursive_doubling.h"

namespace sordino {
namespace {

// Adasum of two vectors: (1 - x·y / 2|x|²) x + (1 - x·y / 2|y|²) y. Orthogonal vectors add, equal ones average.
void adasum_merge(DType dtype, const std::byte* x, const std::byte* y, std::byte* into, std::size_t count) {
  const kernels::Dots dots = kernels::dots(dtype, x, y, count);
  const double a = dots.xx > 0 ? 1 - dots.xy / (2 * dots.xx) : 1;
  const double b = dots.yy > 0 ? 1 - dots.xy / (2 * dots.yy) : 1;
  if (into == x) {
    kernels::axpby(dtype, y, into, count, b, a);
  } else {
    kernels::axpby(dtype, x, into, count, a, b);
  }
}

}  // namespace

Task adasum(Participants& participants, Pieces& pieces, double pre, double post) {
  const DType dtype = pieces.dtype();
  Compute& compute = *participants.compute;
  Flat flat(compute, pieces);
  co_await flat.begin(pre);
  const std::vector<Piece>& tensors = pieces.all();
  const auto received = compute.scratch(pieces.bytes());
  co_await compute.idle();
  co_await recursive_doubling(Team::whole(participants), std::span(flat.data(), pieces.bytes()), received.get(), 0,
                              [&](std::byte* lower, std::byte* upper, std::byte* into) {
                                std::size_t at = 0;
                                for (const Piece& tensor : tensors) {
                                  adasum_merge(dtype, lower + at, upper + at, into + at, tensor.count);
                                  at += tensor.count * size_of(dtype);
                                }
                                return Until{};
                              });
  co_await flat.finish(post);
}

}  // namespace sordino
