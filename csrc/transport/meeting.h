// How processes that are to be ranks of one world come to know each other: each shows something, and all see it.
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
  // What every rank has shown, by rank; waits for all of them. Throws Timeout, or PeerLost, with those that do not
  // come.
  virtual std::vector<Bytes> gather(Bytes mine) = 0;
  // The rank that stands for this one's machine, where the launcher says which ranks share one; -1 where it does not.
  virtual int host_leader() { return -1; }
};

// 32 bytes that rank 0 has drawn: another secret each time. Collective.
std::string shared_secret(Meeting& meeting);

// What the ranks show each other before anything else: `compare` throws if they do not fit together.
struct Comparison {
  std::string fingerprint;
  std::function<void(const std::vector<std::string>& fingerprints)> compare;  // by rank
};

}  // namespace sordino
