// The ranks of the stand-in for NCCL (fake_nccl.cc), and their operations. All functions are called with one lock held.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "transport/nccl/api.h"

namespace sordino::fake_nccl {

using namespace sordino::nccl;

inline constexpr int kPolls = 3;  // number of polls for which a call is in progress

enum class Opcode { kAllReduce, kReduce, kBroadcast, kReduceScatter, kAllGather, kSend, kReceive };

struct Call {
  Opcode opcode;
  const std::byte* in;
  std::byte* out;
  std::size_t count;
  Type type;
  Op op;
  int root;  // or the peer
  void* stream;

  bool matches(const Call& o) const {
    return opcode == o.opcode && count == o.count && type == o.type && op == o.op && root == o.root;
  }
  std::string text() const;
};

// A call that has begun on its stream.
struct Post {
  Call call;
  bool done = false, dead = false;
};

struct Member;

struct Clique {
  int size;
  std::vector<std::shared_ptr<Member>> members;  // by rank; null until that rank has come
  std::map<std::uint64_t, std::vector<std::shared_ptr<Post>>> collectives;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Post>>> sends, receives;  // by source and destination
};

struct Member {
  std::shared_ptr<Clique> clique;
  int rank;
  unsigned long long device;
  Result state = kInProgress;
  int polls = kPolls;
  std::vector<Call> calls;  // not on a stream yet
  std::uint64_t collectives = 0;
  int queued = 0, running = 0;  // launches on streams
  bool aborted = false, finalized = false;
};

// Keeps the text for ncclGetLastError.
Result complain(Result result, const std::string& text);
const char* last_complaint();
// Makes all ranks of the clique fail.
void break_clique(Clique& clique, Result result, const std::string& text);

// Returns the error with which NCCL would refuse the call.
Result valid(const Member& member, const Call& call);
// Begins the call on the member's stream. If it is the last missing call of its operation, the operation runs at once.
void begin(Member& member, const std::shared_ptr<Post>& post);

}  // namespace sordino::fake_nccl
