// All-gather: everybody gets the values of all, one after the other, by messages round a ring, or by NCCL.
#include <algorithm>

#include "collectives/operations.h"

namespace sordino {

// A ring: in step s everybody passes on the block it got in step s-1.
Task allgather(Participants& participants, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  if (participants.channel) {
    for (int step = 0; step < participants.size() - 1; ++step) {
      const int passed_on = (participants.me + participants.size() - step) % participants.size();
      participants.count_sent((participants.me + 1) % participants.size(), sizes[static_cast<std::size_t>(passed_on)]);
    }
    co_await nccl::allgather(*participants.channel, input, std::move(sizes), output);
    co_return;
  }
  const int size = participants.size();
  std::vector<std::size_t> starts(sizes.size() + 1, 0);
  for (std::size_t i = 0; i < sizes.size(); ++i) starts[i + 1] = starts[i] + sizes[i];
  const auto block = [&](int index) {
    const auto wrapped = static_cast<std::size_t>((index % size + size) % size);
    return std::span(output + starts[wrapped], sizes[wrapped]);
  };
  co_await participants.compute->copy(block(participants.me).data(), input, block(participants.me).size());
  for (int step = 0; step < size - 1; ++step) {
    co_await participants.exchange((participants.me + 1) % size, block(participants.me - step),
                                   (participants.me + size - 1) % size, block(participants.me - step - 1));
  }
}

namespace nccl {

Task allgather(Channel& channel, const std::byte* input, std::vector<std::size_t> sizes, std::byte* output) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  if (std::equal(sizes.begin() + 1, sizes.end(), sizes.begin())) {
    communicator.all_gather(input, output, sizes[0], channel.stream());
  } else {
    Group group(communicator);
    for (int root = 0; root < communicator.size(); ++root) {
      const std::size_t bytes = sizes[static_cast<std::size_t>(root)];
      communicator.broadcast(root == communicator.rank() ? input : output, output, bytes, root, channel.stream());
      output += bytes;
    }
    group.end();
  }
  co_await channel.ready();
}

}  // namespace nccl
}  // namespace sordino
