// CHECK(condition, detail...) counts; report() prints the counts and gives main its exit status.
#pragma once

#include <atomic>
#include <iostream>

namespace sordino::test {

inline std::atomic<long> passed{0};
inline std::atomic<long> failed{0};

template <class... Detail>
void check(bool ok, const char* condition, const char* file, int line, const Detail&... detail) {
  constexpr long kShown = 20;  // of a broken kernel's million mismatches, the first few are enough
  if (ok) {
    ++passed;
  } else if (++failed <= kShown) {
    std::cerr << file << ':' << line << ": " << condition;
    ((std::cerr << ' ' << detail), ...);
    std::cerr << '\n';
  }
}

inline int report() {
  std::cout << passed << " passed, " << failed << " failed\n";
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace sordino::test

#define CHECK(condition, ...) \
  ::sordino::test::check(static_cast<bool>(condition), #condition, __FILE__, __LINE__ __VA_OPT__(, ) __VA_ARGS__)

// Checks that `statement` throws exactly an `Error` or a class derived from it.
#define CHECK_THROWS(Error, statement)                                                \
  do {                                                                                \
    bool thrown = false;                                                              \
    try {                                                                             \
      statement;                                                                      \
    } catch (const Error&) {                                                          \
      thrown = true;                                                                  \
    }                                                                                 \
    ::sordino::test::check(thrown, #statement " throws " #Error, __FILE__, __LINE__); \
  } while (false)
