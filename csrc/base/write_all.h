// Writes to a file that may accept only a part at a time.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <string_view>

namespace sordino {

// Writes all of the text, or as much as possible before an error (the file is closed, its disk is full).
inline void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

}  // namespace sordino
