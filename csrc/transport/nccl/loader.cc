#include "transport/nccl/loader.h"

#include <dlfcn.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "base/config.h"
#include "base/error.h"

namespace sordino::nccl {
namespace {

constexpr int kSharesDevices = 23000;
constexpr const char* kLibrary = "libnccl.so.2";
constexpr const char* kHowToGetIt =
    " Install NCCL 2.14 or later (`pip install nvidia-nccl-cu13`, or nvidia-nccl-cu12 for CUDA 12; the CUDA build of "
    "torch brings one), or name its file in SORDINO_NCCL.";

std::mutex mutex;
std::string hinted;

struct Found {
  Api api;
  std::string name;
  int version = 0;
};

std::string version_name(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code % 10000 / 100) + "." + std::to_string(code % 100);
}

void* open_library() {
  const std::string named = Config::from_environment().nccl;
  if (named == "off") throw NotBuilt("NCCL is switched off by SORDINO_NCCL=off; unset that variable to use it.");
  const auto open = [](const std::string& path, int flags) {
    return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
  };
  if (!named.empty()) {
    if (void* handle = open(named, 0)) return handle;
    throw NotBuilt("SORDINO_NCCL='" + named + "' does not load: " + dlerror() + ". Correct it or unset it.");
  }
  if (void* handle = open(kLibrary, RTLD_NOLOAD)) return handle;
  std::string why;
  if (!hinted.empty()) {
    if (void* handle = open(hinted, 0)) return handle;
    why = std::string(dlerror()) + "; ";
  }
  if (void* handle = open(kLibrary, 0)) return handle;
  throw NotBuilt("no NCCL was found (" + why + dlerror() + ")." + kHowToGetIt);
}

template <class Function>
void find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) throw NotBuilt(std::string("the NCCL that was found has no ") + name + "." + kHowToGetIt);
}

Found find_all(void* library) {
  Found found{};
  Api& api = found.api;
  find(library, "ncclGetVersion", api.get_version);
  Dl_info where;
  const bool known = dladdr(reinterpret_cast<void*>(api.get_version), &where) != 0;
  const std::string file = known ? std::filesystem::path(where.dli_fname).filename().string() : kLibrary;
  int& version = found.version;
  if (api.get_version(&version) != kSuccess) throw NotBuilt(file + " does not report its version." + kHowToGetIt);
  // Before 2.9 the version number had one digit less.
  if (version < kOldestVersion) {
    const std::string old = version < 10000 ? std::to_string(version / 1000) + "." + std::to_string(version / 100 % 10)
                                            : version_name(version);
    throw NotBuilt(file + " is NCCL " + old + ", which is too old." + kHowToGetIt);
  }
  found.name = "NCCL " + version_name(version) + ", " + file;
  find(library, "ncclGetUniqueId", api.get_unique_id);
  find(library, "ncclCommInitRankConfig", api.init_rank);
  find(library, "ncclCommFinalize", api.finalize);
  find(library, "ncclCommDestroy", api.destroy);
  find(library, "ncclCommAbort", api.abort);
  find(library, "ncclCommGetAsyncError", api.async_error);
  find(library, "ncclGetErrorString", api.error_string);
  find(library, "ncclGetLastError", api.last_error);
  find(library, "ncclGroupStart", api.group_start);
  find(library, "ncclGroupEnd", api.group_end);
  find(library, "ncclAllReduce", api.all_reduce);
  find(library, "ncclReduce", api.reduce);
  find(library, "ncclBroadcast", api.broadcast);
  find(library, "ncclReduceScatter", api.reduce_scatter);
  find(library, "ncclAllGather", api.all_gather);
  find(library, "ncclSend", api.send);
  find(library, "ncclRecv", api.receive);
  return found;
}

const Found& found() {
  static const Found* known = nullptr;  // never freed, like the library: NCCL's threads may live until the process ends
  std::lock_guard lock(mutex);
  if (known == nullptr) {
    void* library = open_library();
    try {
      known = new Found(find_all(library));
    } catch (...) {
      dlclose(library);
      throw;
    }
  }
  return *known;
}

}  // namespace

const Api& api() { return found().api; }

bool available() {
  try {
    api();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool shares_devices() {
  const char* setting = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return setting != nullptr && std::string(setting) == "1" && found().version >= kSharesDevices;
}

void hint(const std::string& path) {
  std::lock_guard lock(mutex);
  hinted = path;
}

std::string describe() { return found().name; }

}  // namespace sordino::nccl
