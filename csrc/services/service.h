// What a rank does for others beside its operations: it answers messages whenever they come, on whichever thread polls
// the world, and nobody of its own need call anything for it.
#pragma once

#include <exception>

#include "base/time.h"
#include "base/wire.h"

namespace sordino {

// All methods are called by whoever polls the world, never by two threads at once.
class Service {
 public:
  virtual ~Service() = default;
  // A message of the service with the same number on another rank.
  virtual void receive(int from, Reader& reader) = 0;
  // Moves on what is under way; true if anything moved.
  virtual bool advance(Time now) = 0;
  // The rank has left or died, or closed its service.
  virtual void lost(int rank) = 0;
  // The world has failed or been shut down: nothing will be called any more. Memory that transfers may still touch
  // stays with the service, which the world keeps.
  virtual void end(std::exception_ptr why) = 0;
  // Whether nothing that was under way when it ended still is. Until then advance() may be called.
  virtual bool settled() const = 0;
};

}  // namespace sordino
