// Meeting: lets the future ranks of a world exchange data before they have a transport.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/wire.h"

namespace sordino {

class Meeting {
 public:
  virtual ~Meeting() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Gathers one byte string from each rank; the result is indexed by rank. Waits for all ranks: over MPI without a
  // limit. Throws Timeout or PeerLost, which name the missing ranks; over MPI TransportError, or PeerLost without
  // ranks.
  virtual std::vector<Bytes> gather(Bytes mine) = 0;
  // The rank that represents this rank's machine, if the launcher reports which ranks share a machine; otherwise -1.
  virtual int host_leader() { return -1; }
};

// 32 bytes drawn by rank 0, different for each call. Collective call.
std::string shared_secret(Meeting& meeting);

// The first exchange of the ranks. `compare` throws if their fingerprints do not fit together.
struct Comparison {
  std::string fingerprint;
  std::function<void(const std::vector<std::string>& fingerprints)> compare;  // by rank
};

}  // namespace sordino
