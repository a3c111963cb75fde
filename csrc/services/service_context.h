// The part of a world that a service can use: messages and transfers to other ranks, but no operations.
#pragma once

#include "base/ledger.h"
#include "base/trace.h"
#include "base/wire.h"
#include "transport/transport.h"

namespace sordino {

// Any thread may call wake(), and use what does not change (ranks, memory, the trace, the ledger). Only the thread that
// calls the service's methods may use anything else.
class ServiceContext {
 public:
  virtual ~ServiceContext() = default;
  // Reports new work for services to the polling thread.
  virtual void wake() = 0;
  // The transport, for bulk data (with tags of next_tag()) and for memory that the ranks of a node share.
  virtual Transport& transport() = 0;
  // Sends a message to the service with this number on another rank; does nothing if that rank has left.
  virtual void post(int number, int to, const Bytes& message) = 0;
  // Returns a tag with which no other rank sends to this one. Tags repeat after a while.
  virtual Tag next_tag() = 0;
  virtual void count_sent(int to, std::size_t bytes) = 0;
  virtual bool has_left(int rank) const = 0;
  virtual Trace& trace() = 0;
  virtual Ledger& ledger() = 0;
};

}  // namespace sordino
