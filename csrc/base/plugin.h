// Sordino's libraries next to libsordino.so that are opened at run time, because their dependencies may be missing.
#pragma once

#include <filesystem>
#include <string>

#include "base/error.h"

namespace sordino::plugin {

// Returns the path of the library with this file name. The file need not exist.
std::filesystem::path path_of(const std::string& name);

// Opens a library, which stays loaded until the process ends. Returns null if that fails; `why` is then the reason.
void* open(const std::filesystem::path& path, std::string& why);

// Returns the address of an exported function. Throws TransportError if there is no function of this name.
void* symbol(void* library, const char* name);

}  // namespace sordino::plugin
