// The queue of log lines: lines that a reader takes, and lines that are printed on stderr.
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "check.h"

namespace sordino {
namespace {

using log::Level;

// Text that is written to stderr during its life. A pipe holds it, up to 64 KiB.
class Stderr {
 public:
  Stderr() : before_(dup(STDERR_FILENO)) {
    CHECK(pipe(ends_) == 0);
    dup2(ends_[1], STDERR_FILENO);
  }
  ~Stderr() {
    dup2(before_, STDERR_FILENO);
    for (const int fd : {before_, ends_[0], ends_[1]}) close(fd);
  }
  // Returns the next text; waits for it.
  std::string next() {
    char text[4096];
    const ssize_t count = read(ends_[0], text, sizeof(text));
    return {text, static_cast<std::size_t>(count > 0 ? count : 0)};
  }

 private:
  int before_;
  int ends_[2] = {-1, -1};
};

void without_a_reader_lines_are_printed() {
  Stderr printed;
  log::say(Level::kInfo, 0, "too low");
  log::say(Level::kWarning, 3, "one");
  CHECK(printed.next() == "sordino: one\n");
  CHECK(!log::take() && !log::wait());
}

void a_reader_takes_lines_in_their_order() {
  log::open(Level::kWarning);
  log::say(Level::kWarning, 3, "one");
  log::say(Level::kError, log::kNoRank, "two");
  CHECK(log::wait());
  const auto one = log::take();
  const auto two = log::take();
  CHECK(one && one->level == Level::kWarning && one->rank == 3 && one->text == "one");
  CHECK(two && two->level == Level::kError && two->rank == log::kNoRank && two->text == "two");
  CHECK(!log::take());
}

void a_line_that_is_not_taken_is_printed() {
  Stderr printed;
  log::say(Level::kInfo, 0, "too low");
  log::say(Level::kWarning, 0, "one");
  CHECK(printed.next() == "sordino: one\n");
  const auto low = log::take();
  CHECK(low && low->text == "too low" && !low->on_stderr);
  const auto one = log::take();
  CHECK(one && one->text == "one" && one->on_stderr);
}

// Each of these lines is either taken or printed.
void a_full_queue_prints_its_oldest_line() {
  constexpr int kMost = 1000;
  Stderr printed;
  for (int i = 0; i <= kMost; ++i) log::say(Level::kError, 0, std::to_string(i));
  CHECK(printed.next().starts_with("sordino: 0\n"));
  int taken = 0;
  while (const auto line = log::take()) CHECK(line->text == std::to_string(++taken), line->text);
  CHECK(taken == kMost);
}

void a_forked_child_has_neither_reader_nor_lines() {
  Stderr printed;
  log::say(Level::kWarning, 0, "of the parent");
  const pid_t child = fork();
  if (child == 0) {
    const bool none = !log::take() && !log::wait();
    log::say(Level::kWarning, 0, "of the child");
    log::close();
    _exit(none ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  const auto line = log::take();
  CHECK(line && line->text == "of the parent");
  CHECK(printed.next().find("sordino: of the child\n") != std::string::npos);
}

void closing_ends_a_wait_and_keeps_lines() {
  Stderr printed;
  bool waited = true;
  std::thread reader([&] { waited = log::wait(); });
  log::close();
  reader.join();
  CHECK(!waited);
  log::open(Level::kError);
  log::say(Level::kError, 0, "one");
  log::close();
  log::say(Level::kWarning, 0, "too low");
  log::say(Level::kError, 0, "two");
  CHECK(printed.next().ends_with("sordino: two\n"));
  const auto one = log::take();
  CHECK(one && one->text == "one");
  CHECK(!log::take());
}

void lines_of_several_threads_are_whole() {
  constexpr int kThreads = 4, kEach = 200;
  log::open(Level::kWarning);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([rank] {
      for (int i = 0; i < kEach; ++i) log::say(Level::kInfo, rank, std::to_string(i));
    });
  }
  std::vector<int> next(kThreads);
  for (int i = 0; i < kThreads * kEach; ++i) {
    CHECK(log::wait());
    const auto line = log::take();
    CHECK(line && line->text == std::to_string(next[static_cast<std::size_t>(line->rank)]++));
  }
  for (std::thread& thread : threads) thread.join();
  log::close();
}

}  // namespace
}  // namespace sordino

int main() {
  using namespace sordino;
  without_a_reader_lines_are_printed();
  a_reader_takes_lines_in_their_order();
  a_line_that_is_not_taken_is_printed();
  a_full_queue_prints_its_oldest_line();
  a_forked_child_has_neither_reader_nor_lines();
  closing_ends_a_wait_and_keeps_lines();
  lines_of_several_threads_are_whole();
  return test::report();
}
