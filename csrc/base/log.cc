#include "base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/keep.h"
#include "base/write_all.h"

namespace sordino::log {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kReaderTime{1};  // after which an unread line goes to stderr
constexpr std::size_t kMostLines = 1000;        // in the queue

// One write per line, so that lines of several processes do not mix.
void write_to_stderr(const Line& line) { write_all(STDERR_FILENO, "sordino: " + line.text + "\n"); }

// Lines of one process that wait for its reader. Never destroyed, because threads may log until the process ends.
class Queue {
 public:
  bool is_ours() const { return getpid() == process_; }

  void open(Level least) {
    const std::lock_guard held(mutex_);
    least_ = least;
    if (std::exchange(open_, true)) return;
    overdue_writer_ = std::thread([this] { write_overdue_lines(); });
  }

  void close() {
    {
      const std::lock_guard held(mutex_);
      open_ = false;
      changed_.notify_all();
    }
    if (overdue_writer_.joinable()) overdue_writer_.join();
  }

  void say(Line line) {
    std::optional<Line> for_stderr;
    {
      const std::lock_guard held(mutex_);
      if (!open_) {
        for_stderr = std::move(line);
      } else {
        if (waiting_.size() == kMostLines) {
          if (!waiting_.front().line.on_stderr) for_stderr = std::move(waiting_.front().line);
          waiting_.pop_front();
        }
        waiting_.push_back({std::move(line), Clock::now()});
        changed_.notify_all();
      }
      if (for_stderr && for_stderr->level < least_) for_stderr.reset();
    }
    if (for_stderr) write_to_stderr(*for_stderr);
  }

  bool wait() {
    std::unique_lock held(mutex_);
    changed_.wait(held, [this] { return !open_ || !waiting_.empty(); });
    return open_;
  }

  std::optional<Line> take() {
    const std::lock_guard held(mutex_);
    if (waiting_.empty()) return std::nullopt;
    Line line = std::move(waiting_.front().line);
    waiting_.pop_front();
    return line;
  }

 private:
  struct Waiting {
    Line line;
    Clock::time_point since;
  };

  void write_overdue_lines() {
    std::unique_lock held(mutex_);
    while (open_) {
      const auto next = std::find_if(waiting_.begin(), waiting_.end(), [this](const Waiting& one) {
        return !one.line.on_stderr && one.line.level >= least_;
      });
      if (next == waiting_.end()) {
        changed_.wait(held);
      } else if (const auto due = next->since + kReaderTime; Clock::now() < due) {
        changed_.wait_until(held, due);
      } else {
        next->line.on_stderr = true;
        const Line line = next->line;
        held.unlock();
        write_to_stderr(line);
        held.lock();
      }
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  Level least_ = Level::kWarning;
  std::deque<Waiting> waiting_;
  std::thread overdue_writer_;
};

std::atomic<Queue*> queue{nullptr};

// This process's queue, or null. A forked child does not use its parent's queue: another thread may have held its lock.
Queue* queue_here() {
  Queue* const one = queue.load();
  return one != nullptr && one->is_ours() ? one : nullptr;
}

}  // namespace

void say(Level level, int rank, std::string text) {
  Line line{level, rank, std::move(text)};
  if (Queue* const one = queue_here()) {
    one->say(std::move(line));
  } else if (level >= Level::kWarning) {
    write_to_stderr(line);
  }
}

void open(Level least) {
  if (queue_here() == nullptr) {
    if (Queue* const of_parent = queue.load()) leak_intentionally(of_parent);
    queue = new Queue;
  }
  queue_here()->open(least);
}

bool wait() {
  Queue* const one = queue_here();
  return one != nullptr && one->wait();
}

std::optional<Line> take() {
  Queue* const one = queue_here();
  return one != nullptr ? one->take() : std::nullopt;
}

void close() {
  if (Queue* const one = queue_here()) one->close();
}

}  // namespace sordino::log
