#include "topology/permutation.h"

#include <cmath>
#include <utility>

#include "base/rng.h"

namespace sordino::topology {
namespace {

std::uint32_t draw(std::uint64_t key, std::uint32_t value, std::uint32_t bound) {
  return static_cast<std::uint32_t>(rng::below(rng::key(key, value), bound));
}

}  // namespace

Permutation::Permutation(std::uint32_t size, std::uint64_t key) : size_(size) {
  if (size <= kTable) {
    for (std::uint32_t element = 0; element < size; ++element) image_[element] = static_cast<std::uint8_t>(element);
    for (std::uint32_t left = size; left > 1; --left) std::swap(image_[left - 1], image_[draw(key, left, left)]);
    for (std::uint32_t element = 0; element < size; ++element)
      preimage_[image_[element]] = static_cast<std::uint8_t>(element);
    return;
  }
  left_ = static_cast<std::uint32_t>(std::ceil(std::sqrt(static_cast<double>(size))));
  right_ = (size + left_ - 1) / left_;
  for (int round = 0; round < kRounds; ++round)
    keys_[static_cast<std::size_t>(round)] = rng::key(key, static_cast<std::uint64_t>(round));
}

std::uint32_t Permutation::forward(std::uint32_t element) const {
  std::uint32_t left = element / right_, right = element % right_;
  for (std::size_t round = 0; round < kRounds; round += 2) {
    left += draw(keys_[round], right, left_);
    if (left >= left_) left -= left_;
    right += draw(keys_[round + 1], left, right_);
    if (right >= right_) right -= right_;
  }
  return left * right_ + right;
}

std::uint32_t Permutation::backward(std::uint32_t image) const {
  std::uint32_t left = image / right_, right = image % right_;
  for (std::size_t round = kRounds; round > 0; round -= 2) {
    right += right_ - draw(keys_[round - 1], left, right_);
    if (right >= right_) right -= right_;
    left += left_ - draw(keys_[round - 2], right, left_);
    if (left >= left_) left -= left_;
  }
  return left * right_ + right;
}

std::uint32_t Permutation::operator()(std::uint32_t element) const {
  if (size_ <= kTable) return image_[element];
  do {
    element = forward(element);
  } while (element >= size_);
  return element;
}

std::uint32_t Permutation::inverse(std::uint32_t image) const {
  if (size_ <= kTable) return preimage_[image];
  do {
    image = backward(image);
  } while (image >= size_);
  return image;
}

}  // namespace sordino::topology
