// Link: base class of the ways to carry messages between ranks: shared memory (shm/), MPI (mpi/) and UCX (ucx/). The
// transport of a rank (process/) has one link to the ranks that share memory with it, and one to the other ranks.
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
  // As in Transport, for the ranks that this link reaches.
  virtual void post(int to, Bytes message) = 0;
  virtual bool poll(const Sink& sink) = 0;
  virtual std::unique_ptr<Transfer> send(int to, Tag tag, std::span<const std::byte> data) = 0;
  virtual std::unique_ptr<Transfer> receive(int from, Tag tag, std::span<std::byte> data) = 0;
  virtual bool idle() const = 0;
  virtual bool takes_device_memory() const { return false; }
  // True while transfers are in flight that ring no doorbell when they end.
  virtual bool silent_work() const { return false; }
  virtual std::vector<Loss> take_losses() { return {}; }
  virtual void tolerate_losses() {}
  virtual void abandon() {}
  // True if a process that has used this link can end only when all others end.
  virtual bool ends_together() const { return false; }
};

// Makes the link to ranks of other nodes. Collective call.
using LinkMaker = std::function<std::unique_ptr<Link>(Meeting&)>;

}  // namespace sordino
