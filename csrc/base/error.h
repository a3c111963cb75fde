// Typed errors: every failure a user can meet is one of these, and each maps to one Python class.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sordino {

// Base of all errors of the library (Python: sordino.errors.SordinoError, alias HorovodInternalError).
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller asked for something impossible; nothing was sent.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks disagree about an operation (shape, dtype, op, root); raised on all of them, the world lives on.
class OperationMismatch : public UsageError {
 public:
  using UsageError::UsageError;
};

// One or more ranks have died, left or raised; latched, every later operation raises it too.
class PeerLost : public Error {
 public:
  PeerLost(const std::string& what, std::vector<int> ranks) : Error(what), ranks(std::move(ranks)) {}
  std::vector<int> ranks;
};

// A deadline passed; latched like PeerLost.
class Timeout : public Error {
 public:
  Timeout(const std::string& what, std::string operation, std::vector<int> missing)
      : Error(what), operation(std::move(operation)), missing(std::move(missing)) {}
  std::string operation;
  std::vector<int> missing;
};

// Too few of the ranks that may be alive answer: the others may go on, so this one must not.
class NoQuorum : public Error {
 public:
  using Error::Error;
};

// The others have gone on without this rank.
class Evicted : public Error {
 public:
  using Error::Error;
};

// The byte mover below failed (MPI error, shared memory exhausted).
class TransportError : public Error {
 public:
  using Error::Error;
};

// Memory of a peer is gone, with its process or because the peer has freed it. Whether that is a loss, others tell.
class MemoryGone : public TransportError {
 public:
  MemoryGone(const std::string& what, int rank) : TransportError(what), rank(rank) {}
  int rank;
};

// A GPU, or what drives it, failed; what it was to compute is lost.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// This build or this machine lacks a feature; the text says how to get it.
class NotBuilt : public Error {
 public:
  using Error::Error;
};

}  // namespace sordino
