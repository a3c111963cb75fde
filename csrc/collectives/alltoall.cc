// All-to-all: everybody gets a part of everybody's values, by messages between pairs, or by NCCL.
#include "collectives/operations.h"

namespace sordino {

Task alltoall(Participants& participants, const std::byte* input, std::vector<std::size_t> send_sizes,
              std::byte* output, std::vector<std::size_t> receive_sizes) {
  if (participants.channel) {
    for (int peer = 0; peer < participants.size(); ++peer) {
      if (peer != participants.me) participants.count_sent(peer, send_sizes[static_cast<std::size_t>(peer)]);
    }
    co_await nccl::alltoall(*participants.channel, input, std::move(send_sizes), output, std::move(receive_sizes));
    co_return;
  }
  const int size = participants.size();
  const auto cut = [size](auto* data, const std::vector<std::size_t>& sizes) {
    std::vector<std::span<std::remove_pointer_t<decltype(data)>>> parts;
    for (int index = 0; index < size; ++index) {
      parts.emplace_back(data, sizes[static_cast<std::size_t>(index)]);
      data += sizes[static_cast<std::size_t>(index)];
    }
    return parts;
  };
  const auto out = cut(input, send_sizes);
  const auto in = cut(output, receive_sizes);
  co_await participants.compute->copy(in[participants.me].data(), out[participants.me].data(),
                                      out[participants.me].size());
  for (int step = 1; step < size; ++step) {
    const int to = (participants.me + step) % size, from = (participants.me + size - step) % size;
    co_await participants.exchange(to, out[to], from, in[from]);
  }
}

namespace nccl {

Task alltoall(Channel& channel, const std::byte* input, std::vector<std::size_t> send_sizes, std::byte* output,
              std::vector<std::size_t> receive_sizes) {
  Communicator& communicator = channel.communicator();
  co_await channel.ready();
  {
    Group group(communicator);
    for (int peer = 0; peer < communicator.size(); ++peer) {
      const std::size_t out = send_sizes[static_cast<std::size_t>(peer)];
      const std::size_t in = receive_sizes[static_cast<std::size_t>(peer)];
      if (peer == communicator.rank()) {
        if (in > 0) channel.device().copy(output, input, in, channel.stream());
      } else {
        communicator.send(input, out, peer, channel.stream());
        communicator.receive(output, in, peer, channel.stream());
      }
      input += out;
      output += in;
    }
    group.end();
  }
  co_await channel.ready();
}

}  // namespace nccl
}  // namespace sordino
