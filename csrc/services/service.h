// Service: work of a rank for other ranks, besides its operations. It answers messages at any time, on the thread that
// polls the world, without a call of its own rank's program.
#pragma once

#include <exception>

#include "base/time.h"
#include "base/wire.h"

namespace sordino {

// All methods are called by the thread that polls the world, and never by two threads at once.
class Service {
 public:
  virtual ~Service() = default;
  // Takes a message of the service with the same number on rank `from`.
  virtual void receive(int from, Reader& reader) = 0;
  // Advances the work under way. Returns whether anything moved.
  virtual bool advance(Time now) = 0;
  // Called when a rank has left or died, or has closed its service.
  virtual void lost(int rank) = 0;
  // Called when the world has failed or been shut down, or the service is being closed. No new work may begin. The
  // service keeps memory that transfers may still use, and the world keeps the service until it is settled().
  virtual void end(std::exception_ptr why) = 0;
  // Whether all work that was under way at the end is done. Until then, advance() is still called.
  virtual bool settled() const = 0;
};

}  // namespace sordino
