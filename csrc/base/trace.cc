#include "base/trace.h"

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace sordino {
namespace {

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

}  // namespace

void Trace::start(const std::string& path, int rank, bool mark_cycles) {
  std::lock_guard lock(mutex_);
  if (file_ != nullptr) throw UsageError("a timeline is being written already; call stop_timeline() first");
  file_ = std::fopen(path.c_str(), "w");
  if (file_ == nullptr) throw UsageError("cannot write the timeline '" + path + "': " + std::strerror(errno));
  rank_ = rank;
  mark_cycles_ = mark_cycles;
  start_ = std::chrono::steady_clock::now();
  lanes_.clear();
  const auto since_epoch =
      std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch());
  std::fprintf(file_, "[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": \"rank %d\", ",
               rank, rank);
  std::fprintf(file_, "\"start_time_since_epoch_in_micros\": %lld}}", static_cast<long long>(since_epoch.count()));
  on_ = true;
}

void Trace::stop() {
  std::lock_guard lock(mutex_);
  on_ = false;
  if (file_ == nullptr) return;
  std::fprintf(file_, "\n]\n");
  std::fclose(file_);
  file_ = nullptr;
}

int Trace::lane(const std::string& tensor) {
  const auto [found, added] = lanes_.try_emplace(tensor, static_cast<int>(lanes_.size()) + 1);
  if (added) {
    std::fprintf(file_,
                 ",\n{\"name\": \"thread_name\", \"ph\": \"M\", \"pid\": %d, \"tid\": %d, \"args\": {\"name\": %s}}",
                 rank_, found->second, quoted(tensor).c_str());
  }
  return found->second;
}

void Trace::span(const std::string& tensor, const std::string& activity, Time begin, Time end, std::size_t bytes) {
  std::lock_guard lock(mutex_);
  if (file_ == nullptr) return;
  const int tid = lane(tensor);
  std::fprintf(file_,
               ",\n{\"name\": %s, \"ph\": \"X\", \"pid\": %d, \"tid\": %d, \"ts\": %.3f, \"dur\": %.3f, \"args\": "
               "{\"bytes\": %zu}}",
               quoted(activity).c_str(), rank_, tid, micros(begin), micros(end) - micros(begin), bytes);
}

void Trace::mark(const std::string& text) {
  std::lock_guard lock(mutex_);
  if (file_ == nullptr || !mark_cycles_) return;
  std::fprintf(file_, ",\n{\"name\": %s, \"ph\": \"i\", \"pid\": %d, \"tid\": 0, \"ts\": %.3f, \"s\": \"g\"}",
               quoted(text).c_str(), rank_, micros(std::chrono::steady_clock::now()));
}

}  // namespace sordino
