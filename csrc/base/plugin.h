// Libraries of ours that are opened at run time, because what they link may be absent: they lie beside libsordino.so.
#pragma once

#include <filesystem>
#include <string>

#include "base/error.h"

namespace sordino::plugin {

// Where the library of this name lies, or would.
std::filesystem::path path_of(const std::string& name);

// Opens it for this process's life. Null if the loader refuses, which `why` then says.
void* open(const std::filesystem::path& path, std::string& why);

// The address of a function that it exports. TransportError if it has none of this name.
void* symbol(void* library, const char* name);

}  // namespace sordino::plugin
