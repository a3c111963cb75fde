// Lists of integers in control messages, as runs of numbers with a common difference: (first, difference, count).
//
// The numbers that a message has for each rank are mostly equal or consecutive. Then they take one run, for any number
// of ranks. Any other long list takes up to about 1.5 times the bytes that it takes without runs.
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "base/wire.h"

namespace sordino {

template <std::integral T>
void put_runs(Writer& writer, const std::vector<T>& values) {
  using Number = std::make_unsigned_t<T>;  // differences wrap
  const auto difference = [&](std::size_t i) {
    return static_cast<Number>(static_cast<Number>(values[i + 1]) - static_cast<Number>(values[i]));
  };
  std::vector<std::size_t> ends;
  for (std::size_t i = 0; i < values.size(); i = ends.back()) {
    std::size_t end = i + 1;
    while (end < values.size() && difference(end - 1) == difference(i)) ++end;
    ends.push_back(end);
  }
  writer.put(static_cast<std::uint32_t>(ends.size()));
  std::size_t begin = 0;
  for (const std::size_t end : ends) {
    writer.put(values[begin]).put(end - begin > 1 ? static_cast<T>(difference(begin)) : T{0});
    writer.put(static_cast<std::uint32_t>(end - begin));
    begin = end;
  }
}

// Throws TransportError for more than `most` numbers, so that a damaged message cannot exhaust memory.
template <std::integral T>
std::vector<T> read_runs(Reader& reader, std::size_t most) {
  using Number = std::make_unsigned_t<T>;
  std::vector<T> values;
  for (auto left = reader.get<std::uint32_t>(); left > 0; --left) {
    auto value = static_cast<Number>(reader.get<T>());
    const auto difference = static_cast<Number>(reader.get<T>());
    const auto count = reader.get<std::uint32_t>();
    if (count == 0 || count > most - values.size())
      throw TransportError("a control message has a list of more than " + std::to_string(most) +
                           " numbers, or a part of a list without any");
    for (std::uint32_t i = 0; i < count; ++i, value += difference) values.push_back(static_cast<T>(value));
  }
  return values;
}

}  // namespace sordino
