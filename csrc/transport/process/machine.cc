#include "transport/process/machine.h"

#include <sys/stat.h>
#include <unistd.h>

#include "base/cores.h"

namespace sordino::process {

std::string machine() {
  struct stat names{};
  if (stat("/proc/self/ns/pid", &names) != 0)
    names.st_ino = static_cast<ino_t>(getpid());  // then the value fits this process only
  return boot_id() + "/" + std::to_string(names.st_ino);
}

}  // namespace sordino::process
