// Service: work of a rank for other ranks, besides its operations. It answers messages at any time, on the thread that
// polls the world; its own rank's program need not call anything.
#pragma once

#include <exception>

#include "base/time.h"
#include "base/wire.h"

namespace sordino {

// All methods are called by the thread that polls the world, and never by two threads at once.
class Service {
 public:
  virtual ~Service() = default;
  // A message of the service with the same number on another rank.
  virtual void receive(int from, Reader& reader) = 0;
  // Advances the work under way. True if anything moved.
  virtual bool advance(Time now) = 0;
  // The rank has left or died, or has closed its service.
  virtual void lost(int rank) = 0;
  // The world has failed or been shut down, or the service is being closed: nothing new may begin. The service keeps
  // memory that transfers may still touch, and the world keeps the service until it is settled().
  virtual void end(std::exception_ptr why) = 0;
  // True if all work that was under way at the end is done. Until then advance() may be called.
  virtual bool settled() const = 0;
};

}  // namespace sordino
