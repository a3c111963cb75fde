// What a service sees of the world that it is open in: the other ranks, ways to reach them, and no operations.
#pragma once

#include "base/ledger.h"
#include "base/trace.h"
#include "base/wire.h"
#include "transport/transport.h"

namespace sordino {

// wake() may be called from any thread, and what does not change (ranks, memory, the trace, the ledger) may be asked
// for from any. All else is only for whoever calls the service's own methods.
class ServiceContext {
 public:
  virtual ~ServiceContext() = default;
  // There is something for services to do.
  virtual void wake() = 0;
  // For bulk data, under tags of next_tag(), and for memory that the node shares.
  virtual Transport& transport() = 0;
  // Sends a message to the service with this number on another rank; none if that has left.
  virtual void post(int number, int to, const Bytes& message) = 0;
  // A tag under which nobody else sends to this rank.
  virtual Tag next_tag() = 0;
  virtual void count_sent(int to, std::size_t bytes) = 0;
  virtual bool has_left(int rank) const = 0;
  virtual Trace& trace() = 0;
  virtual Ledger& ledger() = 0;
};

}  // namespace sordino
