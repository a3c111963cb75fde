#include "transport/process/process_watch.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

#include "base/system_error.h"

namespace sordino::process {
namespace {

struct Facts {
  char state = '?';   // '?': not known
  std::string begun;  // in clock ticks since boot
};

Facts facts_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return {};
  // The name, in brackets, may contain anything. The state follows the last bracket, and the start time is field 22.
  const auto bracket = line.rfind(')');
  if (bracket == std::string::npos) return {};
  std::istringstream rest(line.substr(bracket + 1));
  Facts facts;
  rest >> facts.state;
  constexpr int kBetween = 18;
  for (int field = 0; field <= kBetween; ++field) rest >> facts.begun;
  return facts;
}

}  // namespace

ProcessWatch::ProcessWatch(pid_t pid) : pid_(pid), begun_(facts_of(pid).begun) {
  int error = 0;
  do {
    pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    error = pidfd_ < 0 ? errno : 0;
  } while (error != 0 && failing_of(error) == Failing::kAgain);
  ended_ = error != 0 && failing_of(error) == Failing::kGone;
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(other.pid_),
      pidfd_(std::exchange(other.pidfd_, -1)),
      begun_(std::move(other.begun_)),
      ended_(other.ended_) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(pidfd_, other.pidfd_);
  std::swap(begun_, other.begun_);
  std::swap(ended_, other.ended_);
  return *this;
}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) close(pidfd_);
}

bool ProcessWatch::ended() {
  if (ended_) return true;
  if (pidfd_ >= 0) {
    pollfd watched{pidfd_, POLLIN, 0};
    ended_ = ::poll(&watched, 1, 0) == 1;
  } else {
    ended_ = looks_ended();
  }
  return ended_;
}

std::vector<int> ProcessWatches::take_ended() {
  std::vector<pollfd> polled;
  for (const auto& [key, watch] : watches_) {
    if (watch.descriptor() >= 0) polled.push_back({watch.descriptor(), POLLIN, 0});
  }
  const bool quiet = ::poll(polled.data(), polled.size(), 0) == 0;
  std::vector<int> ended;
  std::erase_if(watches_, [&](auto& entry) {
    auto& [key, watch] = entry;
    if ((quiet && watch.descriptor() >= 0) || !watch.ended()) return false;
    ended.push_back(key);
    return true;
  });
  return ended;
}

bool ProcessWatch::looks_ended() const {
  if (kill(pid_, 0) != 0 && failing_of(errno) == Failing::kGone) return true;
  const Facts facts = facts_of(pid_);  // this needs a free file descriptor; without one, the result of signal 0 is used
  if (facts.state == '?') return false;
  return facts.state == 'Z' || facts.state == 'X' || (!begun_.empty() && facts.begun != begun_);
}

}  // namespace sordino::process
