// Typed errors: every failure that a user can meet is one of these, and each maps to one Python class.
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

// The caller asked for something impossible. Nothing was sent.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks disagree about an operation (shape, dtype, op, root). Raised on all of them; the world survives.
class OperationMismatch : public UsageError {
 public:
  using UsageError::UsageError;
};

// One or more ranks have died, left or raised. Latched: every later operation raises it too.
class PeerLost : public Error {
 public:
  PeerLost(const std::string& what, std::vector<int> ranks) : Error(what), ranks(std::move(ranks)) {}
  std::vector<int> ranks;
};

// A deadline has passed. Latched like PeerLost.
class Timeout : public Error {
 public:
  Timeout(const std::string& what, std::string operation, std::vector<int> missing)
      : Error(what), operation(std::move(operation)), missing(std::move(missing)) {}
  std::string operation;
  std::vector<int> missing;
};

// Too few of the ranks that may be alive answer. The others may go on, so this rank must not.
class NoQuorum : public Error {
 public:
  using Error::Error;
};

// The others have gone on without this rank.
class Evicted : public Error {
 public:
  using Error::Error;
};

// The transport has failed (MPI error, shared memory exhausted).
class TransportError : public Error {
 public:
  using Error::Error;
};

// Memory of a peer is gone, with its process or because the peer has freed it. Other signs tell whether that is a loss.
class MemoryGone : public TransportError {
 public:
  MemoryGone(const std::string& what, int rank) : TransportError(what), rank(rank) {}
  int rank;
};

// A GPU, or its driver, has failed. The results of its work are lost.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// This build or this machine lacks a feature. The text tells how to get it.
class NotBuilt : public Error {
 public:
  using Error::Error;
};

}  // namespace sordino
