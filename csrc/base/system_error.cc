#include "base/system_error.h"

#include <cerrno>
#include <cstring>

#include "base/limits.h"

namespace sordino {

Failing failing_of(int error) {
  switch (error) {
    case EINTR: return Failing::kAgain;
    case ENOENT:
    case ESRCH: return Failing::kGone;
    default: return Failing::kOther;
  }
}

std::string explained(int error) {
  const std::string what = std::strerror(error);
  switch (error) {
    case EMFILE: {
      const Limits::Files files = Limits::files();
      return what + ": this process may have " + std::to_string(files.allowed) +
             " open at once (RLIMIT_NOFILE). Raise the limit, for example by `ulimit -n " +
             std::to_string(files.at_most) + "` before the job starts";
    }
    case ENFILE: return what + ": the limit of the whole machine is reached (sysctl fs.file-max)";
    case ENOMEM: {
      const Limits::Available available = Limits().available_memory();
      return what + ": " + std::to_string(available.bytes) + " bytes are available in " + available.of +
             ". If that is enough, the limit of mappings (sysctl vm.max_map_count) or of the "
             "address space (`ulimit -v`) is reached";
    }
    default: return what;
  }
}

}  // namespace sordino
