#include "fake_nccl_ranks.h"

#include <cstring>

#include "kernels/kernels.h"

namespace sordino::fake_nccl {
namespace {

const char* const kNames[] = {"AllReduce", "Reduce", "Broadcast", "ReduceScatter", "AllGather", "Send", "Recv"};

std::deque<std::string> complaints;  // kept, as callers have pointers to them

DType dtype_of(Type type) {
  constexpr DType types[] = {DType::kInt8,   DType::kUInt8,   DType::kInt32,   DType::kUInt32,  DType::kInt64,
                             DType::kUInt64, DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kBFloat16};
  return types[type];
}

ReduceOp op_of(Op op) {
  constexpr ReduceOp ops[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kSum};
  return ops[op];
}

// Carries out a call that all ranks have reached. Their streams wait in it, so their memory may be accessed.
void perform(const std::vector<std::shared_ptr<Post>>& posts) {
  const Call& call = posts.front()->call;
  const std::size_t parts = posts.size(), bytes = call.count * size_of(dtype_of(call.type));
  const bool scatters = call.opcode == Opcode::kReduceScatter;
  std::vector<std::byte> result(bytes * (scatters || call.opcode == Opcode::kAllGather ? parts : 1));
  if (call.opcode == Opcode::kBroadcast) {
    std::memcpy(result.data(), posts[static_cast<std::size_t>(call.root)]->call.in, bytes);
  } else if (call.opcode == Opcode::kAllGather) {
    for (std::size_t i = 0; i < parts; ++i) std::memcpy(result.data() + i * bytes, posts[i]->call.in, bytes);
  } else {
    std::vector<const std::byte*> sources;
    for (const auto& post : posts) sources.push_back(post->call.in);
    std::byte* destinations[] = {result.data()};
    // Like NCCL, this multiplies before it adds, so that values stay in range.
    const double pre = call.op == kOpAverage ? 1.0 / static_cast<double>(parts) : 1;
    kernels::reduce(op_of(call.op), dtype_of(call.type), sources, destinations, call.count * (scatters ? parts : 1),
                    pre, 1);
  }
  for (std::size_t i = 0; i < parts; ++i) {
    if (call.opcode == Opcode::kReduce && static_cast<int>(i) != call.root) continue;
    const bool part = scatters;
    std::memcpy(posts[i]->call.out, result.data() + (part ? i * bytes : 0), part ? bytes : result.size());
  }
  for (const auto& post : posts) post->done = true;
}

void begin_collective(Member& member, const std::shared_ptr<Post>& post) {
  Clique& clique = *member.clique;
  const std::uint64_t number = member.collectives++;
  auto& posts = clique.collectives[number];
  posts.resize(static_cast<std::size_t>(clique.size));
  posts[static_cast<std::size_t>(member.rank)] = post;
  bool all = true;
  for (std::size_t i = 0; i < posts.size(); ++i) {
    if (!posts[i] || posts[i]->dead) {
      all = false;
    } else if (!posts[i]->call.matches(post->call)) {
      return break_clique(clique, kInternalError,
                          "rank " + std::to_string(member.rank) + " calls " + post->call.text() + " and rank " +
                              std::to_string(i) + " calls " + posts[i]->call.text());
    }
  }
  if (!all) return;
  perform(posts);
  clique.collectives.erase(number);
}

void begin_transfer(Member& member, const std::shared_ptr<Post>& post) {
  Clique& clique = *member.clique;
  const bool sends = post->call.opcode == Opcode::kSend;
  const std::pair pair = sends ? std::pair(member.rank, post->call.root) : std::pair(post->call.root, member.rank);
  (sends ? clique.sends : clique.receives)[pair].push_back(post);
  auto &from = clique.sends[pair], &to = clique.receives[pair];
  if (from.empty() || to.empty() || from.front()->dead || to.front()->dead) return;
  const Call &send = from.front()->call, &receive = to.front()->call;
  if (send.count != receive.count || send.type != receive.type) {
    return break_clique(clique, kInternalError, send.text() + " meets " + receive.text());
  }
  std::memcpy(receive.out, send.in, send.count * size_of(dtype_of(send.type)));
  from.front()->done = to.front()->done = true;
  from.pop_front();
  to.pop_front();
}

bool overlap(const std::byte* a, std::size_t a_bytes, const std::byte* b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

std::string Call::text() const {
  return std::string(kNames[static_cast<int>(opcode)]) + "(count " + std::to_string(count) + ", type " +
         std::to_string(type) + ", op " + std::to_string(op) + ", root " + std::to_string(root) + ")";
}

Result complain(Result result, const std::string& text) {
  complaints.push_back(text);
  return result;
}

const char* last_complaint() { return complaints.empty() ? "" : complaints.back().c_str(); }

void break_clique(Clique& clique, Result result, const std::string& text) {
  complain(result, text);
  for (const auto& member : clique.members) {
    if (member) member->state = result;
  }
}

Result valid(const Member& member, const Call& call) {
  const int size = member.clique->size;
  if (call.type < 0 || call.type > kTypeBFloat16) return complain(kInvalidArgument, "no such type");
  if (call.op < 0 || call.op > kOpAverage) return complain(kInvalidArgument, "no such reduction");
  if (call.root < 0 || call.root >= size) return complain(kInvalidArgument, "no such rank");
  const bool writes = call.opcode != Opcode::kSend && (call.opcode != Opcode::kReduce || member.rank == call.root);
  const bool reads = call.opcode != Opcode::kReceive && (call.opcode != Opcode::kBroadcast || member.rank == call.root);
  if ((reads && call.in == nullptr) || (writes && call.out == nullptr)) return complain(kInvalidArgument, "no buffer");
  for (const Call& other : member.calls) {
    if (other.stream != call.stream) return complain(kInvalidUsage, "several streams in a group");
  }
  if (!reads || !writes) return kSuccess;
  const std::size_t part = call.count * size_of(dtype_of(call.type)),
                    mine = part * static_cast<std::size_t>(member.rank);
  const bool scatters = call.opcode == Opcode::kReduceScatter, gathers = call.opcode == Opcode::kAllGather;
  const auto whole = [&](bool all) { return all ? part * static_cast<std::size_t>(size) : part; };
  const bool in_place = call.in + (scatters ? mine : 0) == call.out + (gathers ? mine : 0);
  if (!in_place && overlap(call.in, whole(scatters), call.out, whole(gathers))) {
    return complain(kInvalidArgument, "buffers overlap");
  }
  return kSuccess;
}

void begin(Member& member, const std::shared_ptr<Post>& post) {
  if (post->call.opcode == Opcode::kSend || post->call.opcode == Opcode::kReceive) {
    begin_transfer(member, post);
  } else {
    begin_collective(member, post);
  }
}

}  // namespace sordino::fake_nccl
