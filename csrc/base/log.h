// Log lines of the core.
//
// A thread of the core may log while it polls, so it must not wait for Python's lock. Lines go through a queue:
//
//   say() --> queue --> take()    the reader, a Python thread, passes the line to `logging` (python/sordino/log)
//               |
//               +----> stderr     after 1 s, by a thread of the core: the reader cannot run while another thread holds
//                                 Python's lock. The line stays in the queue, marked, and the reader takes it later.
//
// A process without a reader (C++ tests, a forked child, a process that is ending) writes each line to stderr at once.
// A full queue drops its oldest line after writing it to stderr.
#pragma once

#include <optional>
#include <string>

namespace sordino::log {

enum class Level { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };  // the numbers of Python's `logging`

constexpr int kNoRank = -1;

struct Line {
  Level level;
  int rank;  // rank that logs it, or kNoRank
  std::string text;
  bool on_stderr = false;  // the core has written it to stderr
};

// Logs a line. May be called from any thread. Blocks only while it writes to stderr.
void say(Level level, int rank, std::string text);

// Functions of the reader. Calls of `open` and `close` must not overlap. A forked child has no reader until it calls
// `open`, and never gets its parent's lines.

// From now on lines wait for the reader. Lines below `least` are not written to stderr. A second call only changes
// `least`.
void open(Level least);
// Waits for a line. Returns false if the reader is closed.
bool wait();
// Takes the oldest line, if any.
std::optional<Line> take();
// From now on lines go to stderr at once. Lines in the queue can still be taken. Idempotent.
void close();

}  // namespace sordino::log
