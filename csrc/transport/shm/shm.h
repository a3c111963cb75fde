// Memory that the processes of one machine share, and a mailbox for each of them in it.
//
// A segment is a memfd: it never has a name, so nothing can be left behind in /dev/shm, whoever is killed when. A
// peer opens it as /proc/<pid>/fd/<fd> on first use and keeps the mapping.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/doorbell.h"
#include "transport/transport.h"

namespace sordino::shm {

class ShmMemory : public NodeMemory {
 public:
  std::shared_ptr<Segment> allocate(std::size_t bytes) override;

  // Tells where `rank` lives, before anything of it is mapped. This process itself counts as a peer.
  void introduce(int rank, pid_t pid) { pids_[rank] = pid; }
  ~ShmMemory() override;

 protected:
  std::byte* map_host(int rank, const Location& location) override;
  void unmap_host(int rank, std::uint64_t segment) override;

 private:
  struct Mapping {
    std::byte* data;
    std::size_t bytes;
  };
  std::unordered_map<int, pid_t> pids_;
  std::unordered_map<int, std::unordered_map<std::uint64_t, Mapping>> mapped_;
};

// The mailboxes of one node: a byte ring for every ordered pair of its ranks, and a doorbell for each rank.
// One writer and one reader a ring, so no lock exists that a killed process could hold.
class Mailboxes {
 public:
  // `here`: the world ranks of this node in order; `boxes[i]` the address of rank here[i]'s box.
  static std::size_t bytes_for(std::size_t node_size);
  Mailboxes(std::vector<int> here, int self, std::vector<std::byte*> boxes);

  void post(int to_index, Bytes message);
  bool poll(const Sink& sink);
  bool idle() const;
  Doorbell& bell(int index) { return *bells_[index]; }

 private:
  struct Ring;
  struct Outgoing {
    Bytes bytes;  // length-prefixed messages that the ring had no room for yet
    std::size_t sent = 0;
  };
  Ring& ring(int owner, int writer);
  bool flush(int to_index);

  std::vector<int> here_;
  int self_;
  std::vector<std::byte*> boxes_;
  std::vector<Doorbell*> bells_;
  std::vector<Outgoing> outgoing_;
  std::vector<Bytes> incoming_;
};

}  // namespace sordino::shm
