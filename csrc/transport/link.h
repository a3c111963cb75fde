// What carries messages between ranks, one kind of way for each class: shared memory (shm/), MPI (mpi/), UCX (ucx/).
// A rank's transport (process/) has one for the ranks that it shares memory with, and one for the others.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "transport/meeting.h"
#include "transport/transport.h"

namespace sordino {

class Link {
 public:
  virtual ~Link() = default;

  virtual std::string name() const = 0;
  // These are as in Transport, for the ranks that this link leads to.
  virtual void post(int to, Bytes message) = 0;
  virtual bool poll(const Sink& sink) = 0;
  virtual std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) = 0;
  virtual bool idle() const = 0;
  virtual bool takes_device_memory() const { return false; }
  // Whether transfers are under way whose end rings no bell.
  virtual bool silent_work() const { return false; }
  virtual std::vector<Loss> take_losses() { return {}; }
  virtual void outlive_peers() {}
  virtual void abandon() {}
  // Whether a process that has used it ends only when the others do.
  virtual bool ends_together() const { return false; }
};

// Makes the link to ranks of other nodes. Collective.
using LinkMaker = std::function<std::unique_ptr<Link>(Meeting&)>;

}  // namespace sordino
