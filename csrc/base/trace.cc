#include "base/trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/write_all.h"

namespace sordino {
namespace {

constexpr std::size_t kFlushAt = 16384;  // bytes

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Formats with three decimals, and a point in every locale.
std::string number(double value) {
  char digits[64];
  const auto [end, problem] = std::to_chars(std::begin(digits), std::end(digits), value, std::chars_format::fixed, 3);
  return problem == std::errc() ? std::string(digits, end) : "0";
}

// Like snprintf, but returns a string of any length.
__attribute__((format(printf, 1, 2))) std::string formatted(const char* format, ...) {
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  std::string out(static_cast<std::size_t>(length), '\0');
  std::vsnprintf(out.data(), out.size() + 1, format, again);
  va_end(again);
  va_end(arguments);
  return out;
}

}  // namespace

void Trace::start(const std::string& path, int rank, bool mark_cycles) {
  std::lock_guard lock(mutex_);
  if (file_ >= 0) throw UsageError("a timeline is being written already; call stop_timeline() first");
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) throw UsageError("cannot write the timeline '" + path + "': " + std::strerror(errno));
  process_ = getpid();
  rank_ = rank;
  mark_cycles_ = mark_cycles;
  start_ = std::chrono::steady_clock::now();
  lanes_.clear();
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch());
  write(
      formatted("[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": \"rank %d\", "
                "\"start_time_since_epoch_in_micros\": %lld}}",
                rank, rank, static_cast<long long>(since_epoch.count())));
  on_ = true;
}

void Trace::stop() {
  if (file_ >= 0 && getpid() != process_) return;  // file and buffer belong to the parent
  std::lock_guard lock(mutex_);
  on_ = false;
  if (file_ < 0) return;
  write("\n]\n");
  flush();
  close(file_);
  file_ = -1;
}

void Trace::take_over(Trace& other) {
  std::scoped_lock lock(mutex_, other.mutex_);
  if (other.file_ < 0 || file_ >= 0) return;
  file_ = std::exchange(other.file_, -1);
  waiting_ = std::exchange(other.waiting_, {});
  lanes_ = std::exchange(other.lanes_, {});
  process_ = other.process_;
  rank_ = other.rank_;
  mark_cycles_ = other.mark_cycles_;
  start_ = other.start_;
  on_ = other.on_.exchange(false);
}

void Trace::write(const std::string& text) {
  waiting_ += text;
  if (waiting_.size() >= kFlushAt) flush();
}

// Drops events that cannot be written, for example to a full disk: a timeline must not end a training run.
void Trace::flush() {
  write_all(file_, waiting_);
  waiting_.clear();
}

int Trace::lane(const std::string& tensor) {
  const auto [found, added] = lanes_.try_emplace(tensor, static_cast<int>(lanes_.size()) + 1);
  if (added) {
    write(formatted(",\n{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": %s}}",
                    rank_, found->second, quoted(tensor).c_str()));
  }
  return found->second;
}

void Trace::span(const std::string& tensor, const std::string& activity, Time begin, Time end, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (file_ < 0) return;
  const int tid = lane(tensor);
  write(
      formatted(",\n{\"name\": %s, \"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"ts\": %s, \"dur\": %s, \"args\": "
                "{\"bytes\": %zu}}",
                quoted(activity).c_str(), rank_, tid, number(micros(begin)).c_str(),
                number(micros(end) - micros(begin)).c_str(), bytes));
}

void Trace::mark(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (file_ < 0 || !mark_cycles_) return;
  write(formatted(",\n{\"name\": %s, \"ph\": \"i\", \"pid\": %d, \"tid\": 0, \"ts\": %s, \"s\": \"g\"}",
                  quoted(text).c_str(), rank_, number(micros(std::chrono::steady_clock::now())).c_str()));
}

}  // namespace sordino
