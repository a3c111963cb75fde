// Our libraries that are opened at run time, because their dependencies may be missing. They are next to libsordino.so.
#pragma once

#include <filesystem>
#include <string>

#include "base/error.h"

namespace sordino::plugin {

// Path of the library of this name, whether or not it exists.
std::filesystem::path path_of(const std::string& name);

// Opens the library until the process ends. Null if the loader refuses; `why` then gives the reason.
void* open(const std::filesystem::path& path, std::string& why);

// Address of an exported function. TransportError if there is no function of this name.
void* symbol(void* library, const char* name);

}  // namespace sordino::plugin
