// Perfect matchings between the rows and the columns of a square matrix along its positive entries.
#pragma once

#include <functional>
#include <vector>

namespace sordino::topology {

class Matching {
 public:
  // `allowed(row, column)`: whether the pair may be matched. In a later call of complete(), it may allow fewer pairs.
  Matching(int size, std::function<bool(int, int)> allowed)
      : size_(size),
        allowed_(std::move(allowed)),
        column_of_(static_cast<std::size_t>(size), -1),
        row_of_(column_of_),
        seen_(column_of_) {}

  // Drops pairs that are no longer allowed, and matches rows without a pair (augmenting paths, Kuhn 1955). Returns a
  // row that cannot be matched, or -1 if all rows are matched.
  int complete() {
    for (int row = 0; row < size_; ++row) {
      const int column = column_of(row);
      if (column < 0 || allowed_(row, column)) continue;
      at(column_of_, row) = at(row_of_, column) = -1;
    }
    for (int row = 0; row < size_; ++row) {
      if (column_of(row) >= 0) continue;
      seen_.assign(seen_.size(), -1);
      if (!augment(row)) return row;
    }
    return -1;
  }

  int column_of(int row) const { return column_of_[static_cast<std::size_t>(row)]; }
  int row_of(int column) const { return row_of_[static_cast<std::size_t>(column)]; }

 private:
  static int& at(std::vector<int>& list, int index) { return list[static_cast<std::size_t>(index)]; }

  bool augment(int row) {
    for (int column = 0; column < size_; ++column) {
      if (at(seen_, column) >= 0 || !allowed_(row, column)) continue;
      at(seen_, column) = row;
      if (row_of(column) < 0 || augment(row_of(column))) {
        at(column_of_, row) = column;
        at(row_of_, column) = row;
        return true;
      }
    }
    return false;
  }

  const int size_;
  const std::function<bool(int, int)> allowed_;
  std::vector<int> column_of_, row_of_, seen_;
};

}  // namespace sordino::topology
