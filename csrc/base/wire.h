// Control messages as bytes: a writer, and a reader that throws TransportError if a message is too short.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace sordino {

using Bytes = std::vector<std::byte>;

class Writer {
 public:
  template <class T>
    requires std::is_trivially_copyable_v<T>
  Writer& put(const T& value) {
    append(&value, sizeof(T));
    return *this;
  }
  Writer& put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    append(text.data(), text.size());
    return *this;
  }
  template <class T>
  Writer& put(const std::vector<T>& values) {
    put(static_cast<std::uint32_t>(values.size()));
    for (const T& value : values) put(value);
    return *this;
  }
  // Writes the bytes without their number. Leaves room, so that a link can append a little without another copy.
  Writer& put_rest(std::span<const std::byte> bytes) {
    constexpr std::size_t kForLink = 64;
    bytes_.reserve(bytes_.size() + bytes.size() + kForLink);
    append(bytes.data(), bytes.size());
    return *this;
  }
  Bytes take() { return std::move(bytes_); }

 private:
  void append(const void* data, std::size_t size) {
    if (bytes_.capacity() == 0) bytes_.reserve(128);
    const auto* const first = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), first, first + size);
  }
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value;
    std::memcpy(&value, cut(sizeof(T)).data(), sizeof(T));
    return value;
  }
  // Reads an enumerator of a type whose last enumerator is `last`. Throws TransportError for a larger value.
  template <class T>
    requires std::is_enum_v<T>
  T one_of(T last) {
    const auto value = get<std::underlying_type_t<T>>();
    static_assert(std::is_unsigned_v<decltype(value)>);
    if (value > static_cast<std::underlying_type_t<T>>(last))
      throw TransportError("a control message holds " + std::to_string(value) + ", but " +
                           std::to_string(static_cast<std::underlying_type_t<T>>(last)) +
                           " is the largest valid value");
    return static_cast<T>(value);
  }
  std::string text() {
    const auto size = get<std::uint32_t>();
    const auto part = cut(size);
    return std::string(reinterpret_cast<const char*>(part.data()), part.size());
  }
  template <class T>
  std::vector<T> list() {
    constexpr std::size_t least = std::is_same_v<T, std::string> ? sizeof(std::uint32_t) : sizeof(T);
    const auto size = get<std::uint32_t>();
    if (size > rest_.size() / least) throw TransportError("a control message is shorter than its header states");
    std::vector<T> values;
    values.reserve(size);
    for (std::uint32_t i = 0; i < size; ++i) {
      if constexpr (std::is_same_v<T, std::string>) {
        values.push_back(text());
      } else {
        values.push_back(get<T>());
      }
    }
    return values;
  }
  bool empty() const { return rest_.empty(); }
  std::span<const std::byte> rest() { return cut(rest_.size()); }

 private:
  std::span<const std::byte> cut(std::size_t size) {
    if (size > rest_.size()) throw TransportError("a control message is shorter than its header states");
    auto part = rest_.first(size);
    rest_ = rest_.subspan(size);
    return part;
  }
  std::span<const std::byte> rest_;
};

}  // namespace sordino
