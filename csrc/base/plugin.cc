#include "base/plugin.h"

#include <dlfcn.h>

namespace sordino::plugin {

std::filesystem::path path_of(const std::string& name) {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&path_of), &self) == 0) throw TransportError("dladdr failed");
  return std::filesystem::path(self.dli_fname).parent_path() / name;
}

void* open(const std::filesystem::path& path, std::string& why) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) why = dlerror();
  return handle;
}

void* symbol(void* library, const char* name) {
  void* found = dlsym(library, name);
  if (found != nullptr) return found;
  Dl_info ours;
  const bool known = dladdr(reinterpret_cast<void*>(&path_of), &ours) != 0;
  throw TransportError(std::string("a library next to ") + (known ? ours.dli_fname : "libsordino.so") +
                       " is of another version: it has no function " + name + ". Install Sordino again");
}

}  // namespace sordino::plugin
