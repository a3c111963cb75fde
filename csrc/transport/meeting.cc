#include "transport/meeting.h"

#include <random>

namespace sordino {

std::string shared_secret(Meeting& meeting) {
  constexpr int kWords = 8;
  std::random_device device;
  Writer writer;
  for (int word = 0; word < kWords; ++word) writer.put(static_cast<std::uint32_t>(device()));
  const Bytes drawn = meeting.gather(writer.take()).front();
  return std::string(reinterpret_cast<const char*>(drawn.data()), drawn.size());
}

}  // namespace sordino
