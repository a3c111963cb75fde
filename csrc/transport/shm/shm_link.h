// Link between ranks of one machine: control messages by mailboxes, bulk data by pipes.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "transport/link.h"
#include "transport/shm/mailboxes.h"
#include "transport/shm/memory.h"
#include "transport/shm/pipes.h"

namespace sordino::shm {

class ShmLink : public Link {
 public:
  // `here`: world ranks that the link reaches, including this one (`self`), in order. `boxes`: addresses of their
  // mailboxes.
  ShmLink(ShmMemory& memory, std::vector<int> here, int self, const std::vector<std::byte*>& boxes);

  bool reaches(int rank) const { return index_of(rank) >= 0; }
  Doorbell& bell(int rank) { return mailboxes_.bell(index_of(rank)); }

  std::string name() const override { return "shared memory"; }
  void post(int to, Bytes message) override { mailboxes_.post(index_of(to), std::move(message)); }
  bool poll(const Sink& sink) override;
  std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) override {
    return pipes_.send(index_of(to), tag, data);
  }
  std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) override {
    return pipes_.receive(index_of(from), tag, data);
  }
  bool idle() const override { return mailboxes_.idle(); }
  std::vector<Loss> take_losses() override { return std::exchange(losses_, {}); }

 private:
  int index_of(int rank) const;  // -1 if the link does not reach the rank
  void open_pipe(int from, std::span<const std::byte> message);

  const std::vector<int> here_;
  Mailboxes mailboxes_;
  Pipes pipes_;
  const Sink open_pipe_ = [this](int from, std::span<const std::byte> message) { open_pipe(from, message); };
  std::vector<Loss> losses_;  // ranks whose pipes cannot be mapped
};

}  // namespace sordino::shm
