// Copies between many tensors and one flat buffer; memcpy picks its own instructions.
#include <cstring>

#include "kernels/kernels.h"

namespace sordino::kernels {

void flatten(std::span<const Span> tensors, std::byte* flat) {
  for (const Span& tensor : tensors) {
    // An empty tensor may have no address, and memcpy does not allow null even for 0 bytes.
    if (tensor.data == nullptr || tensor.bytes == 0) continue;
    std::memcpy(flat, tensor.data, tensor.bytes);
    flat += tensor.bytes;
  }
}

void unflatten(const std::byte* flat, std::span<const Span> tensors) {
  for (const Span& tensor : tensors) {
    if (tensor.data == nullptr || tensor.bytes == 0) continue;
    std::memcpy(tensor.data, flat, tensor.bytes);
    flat += tensor.bytes;
  }
}

}  // namespace sordino::kernels
