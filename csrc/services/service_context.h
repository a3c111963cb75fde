// The part of a world that a service can use: the other ranks and ways to reach them, but no operations.
#pragma once

#include "base/ledger.h"
#include "base/trace.h"
#include "base/wire.h"
#include "transport/transport.h"

namespace sordino {

// wake(), and what does not change (ranks, memory, the trace, the ledger), may be used from any thread. All else may be
// used only by the thread that calls the service's methods.
class ServiceContext {
 public:
  virtual ~ServiceContext() = default;
  // Reports new work for services.
  virtual void wake() = 0;
  // For bulk data, under tags of next_tag(), and for memory that the node shares.
  virtual Transport& transport() = 0;
  // Sends a message to the service with this number on another rank; does nothing if that rank has left.
  virtual void post(int number, int to, const Bytes& message) = 0;
  // A tag under which no other rank sends to this one.
  virtual Tag next_tag() = 0;
  virtual void count_sent(int to, std::size_t bytes) = 0;
  virtual bool has_left(int rank) const = 0;
  virtual Trace& trace() = 0;
  virtual Ledger& ledger() = 0;
};

}  // namespace sordino
