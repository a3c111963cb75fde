#include "base/forks.h"

#include <pthread.h>

namespace sordino {
namespace {

std::uint32_t count = 0;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { ++count; });

}  // namespace

std::uint32_t forks() { return count; }

}  // namespace sordino
