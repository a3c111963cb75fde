// Several tensors of one dtype, seen as one flat sequence of elements.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtype.h"
#include "kernels/kernels.h"
#include "kernels/publish.h"

namespace sordino {

struct Piece {
  const std::byte* input;
  std::byte* output;
  std::size_t count;
};

enum class Neighbors { kMerge, kKeepApart };

class Pieces {
 public:
  explicit Pieces(DType dtype, Neighbors neighbors = Neighbors::kMerge) : dtype_(dtype), neighbors_(neighbors) {}

  void add(const std::byte* input, std::byte* output, std::size_t count) {
    if (count == 0) return;
    if (!pieces_.empty() && neighbors_ == Neighbors::kMerge) {
      // Adjacent tensors are one piece, so a segment of an arena is one piece however many tensors it holds.
      Piece& last = pieces_.back();
      const std::size_t last_bytes = last.count * size_of(dtype_);
      if (last.input + last_bytes == input && last.output + last_bytes == output) {
        last.count += count;
        total_ += count;
        return;
      }
    }
    starts_.push_back(total_);
    pieces_.push_back({input, output, count});
    total_ += count;
  }

  DType dtype() const { return dtype_; }
  std::size_t count() const { return total_; }
  std::size_t bytes() const { return total_ * size_of(dtype_); }
  const std::vector<Piece>& all() const { return pieces_; }

  // The only piece, if its input is its output. Null otherwise, or if there are several pieces.
  const Piece* in_place() const {
    return pieces_.size() == 1 && pieces_[0].input == pieces_[0].output ? &pieces_[0] : nullptr;
  }

  // For flatten and unflatten.
  std::vector<kernels::Span> inputs() const {
    return spans([](const Piece& piece) { return piece.input; });
  }
  std::vector<kernels::Span> outputs() const {
    return spans([](const Piece& piece) { return piece.output; });
  }

  // Calls visit(input, output, count, offset) for each run of elements of [begin, end); offset counts from begin.
  template <class Visit>
  void visit(std::size_t begin, std::size_t end, Visit&& visit) const {
    if (begin >= end) return;
    std::size_t index =
        static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin()) - 1;
    for (std::size_t at = begin; at < end; ++index) {
      const Piece& piece = pieces_[index];
      const std::size_t skip = at - starts_[index];
      const std::size_t count = std::min(piece.count - skip, end - at);
      const std::size_t bytes = skip * size_of(dtype_);
      visit(piece.input + bytes, piece.output + bytes, count, at - begin);
      at += count;
    }
  }

  // Peers may read `flat` after a later release store.
  void copy_in(std::size_t begin, std::size_t end, std::byte* flat) const {
    visit(begin, end, [&](const std::byte* input, std::byte*, std::size_t count, std::size_t offset) {
      kernels::publish(flat + offset * size_of(dtype_), input, count * size_of(dtype_));
    });
  }
  void copy_out(std::size_t begin, std::size_t end, const std::byte* flat) const {
    visit(begin, end, [&](const std::byte*, std::byte* output, std::size_t count, std::size_t offset) {
      std::memcpy(output, flat + offset * size_of(dtype_), count * size_of(dtype_));
    });
  }

 private:
  template <class Which>
  std::vector<kernels::Span> spans(Which&& which) const {
    std::vector<kernels::Span> all;
    for (const Piece& piece : pieces_)
      all.push_back({const_cast<std::byte*>(which(piece)), piece.count * size_of(dtype_)});
    return all;
  }

  DType dtype_;
  Neighbors neighbors_;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> starts_;
  std::size_t total_ = 0;
};

}  // namespace sordino
