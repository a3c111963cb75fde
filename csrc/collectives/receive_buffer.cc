#include "collectives/receive_buffer.h"

namespace sordino {

std::byte* ReceiveBuffer::reserve(std::size_t copies, std::size_t bytes, bool shared,
                                  const std::shared_ptr<Device>& device) {
  if (copies * bytes > bytes_ || device != device_) {
    bytes_ = copies * bytes;
    device_ = device;
    segment_ = nullptr;
    private_ = nullptr;
    if (device) {
      segment_ = memory_.allocate_on(device, bytes_);
    } else if (shared) {
      segment_ = memory_.allocate(bytes_);
    } else {
      private_ = std::make_unique_for_overwrite<std::byte[]>(bytes_);
    }
  }
  return data();
}

}  // namespace sordino
