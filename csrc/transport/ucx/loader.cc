#include <dlfcn.h>
#include <signal.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "base/error.h"
#include "base/plugin.h"
#include "transport/ucx/plugin.h"

namespace sordino::ucx {
namespace {

constexpr const char* kLibraries[] = {"libucs.so.0", "libuct.so.0", "libucp.so.0"};  // in order of dependency

std::mutex mutex;
std::string hinted;

// The dynamic loader finds an already loaded library by its name, so the plugin then finds these. RTLD_LOCAL is enough
// for that (UCX's wheel does the same), and replaces no symbols of other libraries.
void load_from(const std::filesystem::path& folder) {
  for (const char* name : kLibraries) {
    if (dlopen((folder / name).c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) return;
  }
}

// Restores signal handlers that UCX takes over when it is loaded. With UCX's handlers, a rank would no longer end with
// its terminal (SIGHUP), and Python's faulthandler would not show where it crashed. Does nothing if the user has
// configured UCX's handlers.
class Signals {
 public:
  Signals() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~Signals() {
    for (const char* name : {"UCX_DEBUG_SIGNO", "UCX_HANDLE_ERRORS", "UCX_ERROR_SIGNALS"}) {
      if (std::getenv(name) != nullptr) return;
    }
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

 private:
  static constexpr std::array kSignals{SIGHUP, SIGILL, SIGBUS, SIGFPE, SIGSEGV};
  std::array<struct sigaction, kSignals.size()> before_;
};

// Disables UCX's memory events while UCX is loaded, unless the user has configured them or the machine has an
// InfiniBand or RoCE card, which needs them. To notice freed memory, UCX would patch mmap(), munmap() and others in the
// running process: 0.4 s of CPU time, during which threads that call them wait.
class MemoryEvents {
 public:
  MemoryEvents() {
    std::error_code none;
    const std::filesystem::directory_iterator cards("/sys/class/infiniband", none), end;
    if (cards == end && std::getenv(kName) == nullptr) is_ours_ = setenv(kName, "n", 1) == 0;
  }
  ~MemoryEvents() {
    if (is_ours_) unsetenv(kName);
  }

 private:
  static constexpr const char* kName = "UCX_MEM_EVENTS";
  bool is_ours_ = false;
};

void* open_plugin() {
  const auto path = plugin::path_of("libsordino_ucx.so");
  if (!std::filesystem::exists(path)) {
    throw NotBuilt(
        "Sordino was built without UCX. Install it (`pip install libucx-cu13` or libucx-cu12, or `apt-get install "
        "libucx-dev`), then build again: `pip install --force-reinstall --no-deps .`");
  }
  const Signals signals;
  const MemoryEvents events;
  std::string why;
  void* handle = plugin::open(path, why);
  if (handle == nullptr && !hinted.empty()) {
    load_from(hinted);
    handle = plugin::open(path, why);
  }
  if (handle == nullptr) {
    const std::string packages = " (`pip install libucx-cu13` or libucx-cu12, or `apt-get install libucx0`)";
    if (why.find("libucp.so.0: cannot open") != std::string::npos) {
      throw NotBuilt("there is no UCX here: " + why + ". Install it" + packages);
    }
    throw TransportError("UCX does not load: " + why + ". Install it again" + packages +
                         ", or build Sordino again with the installed one.");
  }
  return handle;
}

void* symbol(const char* name) {
  static void* library = nullptr;
  std::lock_guard lock(mutex);
  if (library == nullptr) library = open_plugin();
  return plugin::symbol(library, name);
}

}  // namespace

void hint(const std::string& folder) {
  std::lock_guard lock(mutex);
  hinted = folder;
}

std::unique_ptr<Link> connect(Meeting& meeting, const Config& config, const std::string& token) {
  const auto function = reinterpret_cast<ConnectFunction>(symbol(kConnectSymbol));
  return std::unique_ptr<Link>(function(&meeting, &config, &token));
}

std::string describe() { return reinterpret_cast<DescribeFunction>(symbol(kDescribeSymbol))(); }

}  // namespace sordino::ucx
