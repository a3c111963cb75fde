// Typed errors. Every failure that a user can meet has one of these types, and each type has one Python class.
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

// The caller asked for something impossible. Nothing was sent, and the world stays usable.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks disagree about an operation (shape, dtype, op, root). Raised on all of them; the world stays usable.
class OperationMismatch : public UsageError {
 public:
  using UsageError::UsageError;
};

// One or more ranks have died, left or raised. Permanent: every later operation of this world raises it too.
class PeerLost : public Error {
 public:
  PeerLost(const std::string& what, std::vector<int> ranks) : Error(what), ranks(std::move(ranks)) {}
  std::vector<int> ranks;
};

// A deadline has passed. Permanent, like PeerLost.
class Timeout : public Error {
 public:
  Timeout(const std::string& what, std::string operation, std::vector<int> missing)
      : Error(what), operation(std::move(operation)), missing(std::move(missing)) {}
  std::string operation;
  std::vector<int> missing;
};

// No quorum: too few of the ranks that may be alive answer. The others may continue, so this rank must not.
class NoQuorum : public Error {
 public:
  using Error::Error;
};

// The other ranks continue without this rank.
class Evicted : public Error {
 public:
  using Error::Error;
};

// The transport has failed (MPI error, shared memory exhausted).
class TransportError : public Error {
 public:
  using Error::Error;
};

// Memory of a peer no longer exists: its process has ended or freed it. The rank may be alive.
class MemoryGone : public TransportError {
 public:
  MemoryGone(const std::string& what, int rank) : TransportError(what), rank(rank) {}
  int rank;
};

// The kernel cannot copy these bytes of another process's memory. The process lives.
class NotCopied : public TransportError {
 public:
  using TransportError::TransportError;
};

// A GPU, or its driver, has failed. The results of its work are lost.
class DeviceError : public Error {
 public:
  using Error::Error;
};

// This build or this machine lacks a feature. The message says how to get it.
class NotBuilt : public Error {
 public:
  using Error::Error;
};

}  // namespace sordino
