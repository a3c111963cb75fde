// An element at any address, and loops whose iterations are independent. Included by lanes.h only.
#pragma once

#include <cstddef>

#include "kernels/element.h"

// States that iterations of the next loop are independent: a destination is exactly a source, or disjoint from it.
#if defined(__clang__)
#define SORDINO_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SORDINO_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace sordino::kernels::SORDINO_LEVEL {
namespace {

// An element at an address of any alignment, because callers pass slices of byte buffers.
template <class T>
struct __attribute__((packed, may_alias)) Loose {
  T value;
};

template <class T>
const Loose<T>* loose(const std::byte* p) {
  return reinterpret_cast<const Loose<T>*>(p);
}
template <class T>
Loose<T>* loose(std::byte* p) {
  return reinterpret_cast<Loose<T>*>(p);
}

}  // namespace
}  // namespace sordino::kernels::SORDINO_LEVEL
