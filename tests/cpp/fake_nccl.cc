// A stand-in for NCCL whose ranks are threads of one process, for tests without a GPU: the same functions, on host
// memory, run on the streams of the program. It is stricter than NCCL. Where NCCL hangs or gives wrong numbers (ranks
// that call different things, a stream used before the communicator is ready), it returns an error or gives visibly
// wrong results.
#include "fake_nccl.h"

#include <dlfcn.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "fake_nccl_ranks.h"

using namespace sordino::fake_nccl;

namespace {

constexpr int kVersion = 23007;
constexpr char kMagic[] = "fake_nccl";

struct Launch {
  std::shared_ptr<Member> member;
  std::vector<Call> calls;
};

struct Grouping {
  int depth = 0;
  Result error = kSuccess;
  std::vector<std::shared_ptr<Member>> members;
};

std::mutex mutex;
std::condition_variable changed;
// Never destroyed: a clique and its members refer to each other, and a stream may still have work when the program
// ends.
auto& cliques = *new std::map<std::string, std::shared_ptr<Clique>>;
auto& live = *new std::map<Comm*, std::shared_ptr<Member>>;
FakeEnqueue enqueue = nullptr;
bool hang_aborts = false;
int ids = 0, aborts = 0;
auto& groups = *new std::map<int, int>;  // by rank
thread_local Grouping group;
thread_local unsigned long long current_device = 0;
Result refused = kSuccess;  // guarded by `mutex`

// Runs on the stream.
void run(void* argument) {
  const std::unique_ptr<Launch> launch(static_cast<Launch*>(argument));
  Member& member = *launch->member;
  std::unique_lock lock(mutex);
  ++member.running;
  std::vector<std::shared_ptr<Post>> posts;
  for (const Call& call : launch->calls) {
    if (member.aborted) break;
    auto& post = posts.emplace_back(std::make_shared<Post>(Post{call}));
    begin(member, post);
  }
  changed.notify_all();
  for (const auto& post : posts) {
    changed.wait(lock, [&] { return post->done || member.aborted; });
    post->dead = !post->done;
  }
  --member.running;
  --member.queued;
  changed.notify_all();
}

std::shared_ptr<Member> find(Comm* comm) {
  const auto found = live.find(comm);
  return found == live.end() ? nullptr : found->second;
}

Result usable(const Member* member) {
  if (member == nullptr) return complain(kInvalidArgument, "no such communicator, or it has been destroyed");
  if (member->state == kInProgress) return complain(kInvalidArgument, "the previous operation has not succeeded yet");
  if (member->state != kSuccess) return member->state;
  if (member->finalized) return complain(kInvalidUsage, "the communicator is finalized");
  return kSuccess;
}

Result end_group() {
  if (--group.depth > 0) return kSuccess;
  Grouping ended;
  std::swap(ended, group);
  if (ended.members.empty()) return ended.error;
  for (const auto& member : ended.members) {
    int to_self = 0;
    for (const Call& call : member->calls) {
      if (call.opcode == Opcode::kSend && call.root == member->rank) ++to_self;
      if (call.opcode == Opcode::kReceive && call.root == member->rank) --to_self;
    }
    if (to_self != 0) ended.error = complain(kInvalidUsage, "a transfer to oneself without its other half");
  }
  for (const auto& member : ended.members) {
    if (ended.error != kSuccess) {
      member->calls.clear();
    } else {
      member->state = kInProgress;
      member->polls = kPolls;
    }
  }
  return ended.error != kSuccess ? ended.error : kInProgress;
}

Result make(Comm* comm, const Call& call) {
  std::lock_guard lock(mutex);
  ++group.depth;
  const auto member = find(comm);
  Result result = usable(member.get());
  if (result == kSuccess) result = valid(*member, call);
  const bool transfer = call.opcode == Opcode::kSend || call.opcode == Opcode::kReceive;
  if (result == kSuccess && (call.count > 0 || transfer)) {
    member->calls.push_back(call);
    if (member->calls.size() == 1) group.members.push_back(member);
  }
  if (result != kSuccess) group.error = result;
  const Result ended = end_group();
  return result != kSuccess ? result : ended;
}

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

// Makes progress with the latest call. Returns its work for a stream once the call is complete, otherwise null.
std::unique_ptr<Launch> settle(const std::shared_ptr<Member>& member) {
  if (member->state != kInProgress || --member->polls > 0) return nullptr;
  for (const auto& peer : member->clique->members) {
    if (!peer) return nullptr;
  }
  if (member->finalized && member->queued > 0) return nullptr;
  member->state = kSuccess;
  if (member->calls.empty()) return nullptr;
  ++member->queued;
  ++groups[member->rank];
  return std::make_unique<Launch>(Launch{member, std::exchange(member->calls, {})});
}

void join(const std::shared_ptr<Member>& member, int size) {
  Clique& clique = *member->clique;
  const auto rank = static_cast<std::size_t>(member->rank);
  if (clique.size != size || clique.members[rank]) {
    break_clique(clique, kInvalidUsage, "an id is used by more ranks than it is for");
    member->state = kInvalidUsage;
    return;
  }
  for (const auto& peer : clique.members) {
    if (!peer || peer->device != member->device || member->device == 0) continue;
    clique.members[rank] = member;
    return break_clique(
        clique, kInvalidUsage,
        "Duplicate GPU detected: rank " + std::to_string(rank) + " and rank " + std::to_string(peer->rank));
  }
  clique.members[rank] = member;
}

}  // namespace

extern "C" {

void fake_nccl_set_enqueue(FakeEnqueue function) {
  std::lock_guard lock(mutex);
  enqueue = function;
}
void fake_nccl_set_device(unsigned long long identity) { current_device = identity; }

void fake_nccl_break(int rank, int result) {
  std::lock_guard lock(mutex);
  for (auto& [comm, member] : live) {
    if (member->rank == rank) member->state = complain(result, "broken by the test");
  }
}

void fake_nccl_refuse(int result) {
  std::lock_guard lock(mutex);
  refused = static_cast<Result>(result);
}

void fake_nccl_hang_aborts(int hang) {
  std::lock_guard lock(mutex);
  hang_aborts = hang != 0;
  changed.notify_all();
}

int fake_nccl_live() {
  std::lock_guard lock(mutex);
  return static_cast<int>(live.size());
}

int fake_nccl_groups(int rank) {
  std::lock_guard lock(mutex);
  return groups[rank];
}

int fake_nccl_aborts() {
  std::lock_guard lock(mutex);
  return aborts;
}

Result ncclGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

const char* ncclGetErrorString(Result result) {
  const char* const texts[] = {"no error",       "unhandled cuda error", "unhandled system error",
                               "internal error", "invalid argument",     "invalid usage",
                               "remote error",   "operation in progress"};
  return result >= 0 && result <= kInProgress ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(Comm*) {
  std::lock_guard lock(mutex);
  return last_complaint();
}

Result ncclGetUniqueId(UniqueId* id) {
  std::lock_guard lock(mutex);
  std::memset(id, 0, sizeof *id);
  const std::string text = kMagic + std::to_string(++ids);
  std::memcpy(id->internal, text.data(), text.size());
  return kSuccess;
}

Result ncclCommInitRankConfig(Comm** comm, int size, UniqueId id, int rank, Settings* config) {
  std::lock_guard lock(mutex);
  *comm = nullptr;
  if (refused != kSuccess) return complain(refused, "refused by the test");
  if (config == nullptr || config->size < sizeof(Settings) || config->magic != 0xcafebeef || config->version < 21400 ||
      config->blocking != 0 || (config->version < 21700 && config->size != sizeof(Settings))) {
    return complain(kInvalidArgument, "a configuration that is none, or one that blocks");
  }
  if (std::memcmp(id.internal, kMagic, sizeof kMagic - 1) != 0) return complain(kInvalidArgument, "no such id");
  if (size < 1 || rank < 0 || rank >= size) return complain(kInvalidArgument, "no such rank");
  auto& clique = cliques[std::string(id.internal, sizeof id.internal)];
  if (!clique) {
    clique = std::make_shared<Clique>();
    clique->size = size;
    clique->members.resize(static_cast<std::size_t>(size));
  }
  auto member = std::make_shared<Member>();
  member->clique = clique;
  member->rank = rank;
  member->device = current_device;
  *comm = reinterpret_cast<Comm*>(member.get());
  live[*comm] = member;
  join(member, size);
  return member->state;
}

Result ncclCommGetAsyncError(Comm* comm, Result* state) {
  std::unique_lock lock(mutex);
  const auto member = find(comm);
  if (!member) return complain(kInvalidArgument, "no such communicator, or it has been destroyed");
  std::unique_ptr<Launch> launch = settle(member);
  *state = member->state;
  if (!launch) return kSuccess;
  if (enqueue == nullptr) enqueue = reinterpret_cast<FakeEnqueue>(dlsym(RTLD_DEFAULT, "sordino_fake_enqueue"));
  if (enqueue == nullptr) return complain(kInternalError, "no sordino_fake_enqueue");
  const FakeEnqueue put = enqueue;
  lock.unlock();
  void* stream = launch->calls.front().stream;
  put(stream, run, launch.release());
  return kSuccess;
}

Result ncclCommFinalize(Comm* comm) {
  std::lock_guard lock(mutex);
  const auto member = find(comm);
  if (const Result result = usable(member.get()); result != kSuccess) return result;
  member->finalized = true;
  member->polls = kPolls;
  return member->state = kInProgress;
}

Result ncclCommDestroy(Comm* comm) {
  std::unique_lock lock(mutex);
  const auto member = find(comm);
  if (!member || member->state == kInProgress) return complain(kInvalidArgument, "not a communicator, or in progress");
  live.erase(comm);
  changed.wait(lock, [&] { return member->queued == 0; });
  return kSuccess;
}

Result ncclCommAbort(Comm* comm) {
  std::unique_lock lock(mutex);
  const auto member = find(comm);
  if (!member) return complain(kInvalidArgument, "no such communicator, or it has been destroyed");
  ++aborts;
  live.erase(comm);
  member->aborted = true;
  changed.notify_all();
  changed.wait(lock, [&] { return member->running == 0 && !hang_aborts; });
  return kSuccess;
}

Result ncclGroupStart() {
  ++group.depth;
  return kSuccess;
}

Result ncclGroupEnd() {
  std::lock_guard lock(mutex);
  if (group.depth == 0) return complain(kInvalidUsage, "ncclGroupEnd: not in a group call");
  return end_group();
}

Result ncclAllReduce(const void* in, void* out, std::size_t count, Type type, Op op, Comm* comm, void* stream) {
  return make(comm, {Opcode::kAllReduce, bytes(in), bytes(out), count, type, op, 0, stream});
}

Result ncclReduce(const void* in, void* out, std::size_t count, Type type, Op op, int root, Comm* comm, void* stream) {
  return make(comm, {Opcode::kReduce, bytes(in), bytes(out), count, type, op, root, stream});
}

Result ncclBroadcast(const void* in, void* out, std::size_t count, Type type, int root, Comm* comm, void* stream) {
  return make(comm, {Opcode::kBroadcast, bytes(in), bytes(out), count, type, 0, root, stream});
}

Result ncclReduceScatter(const void* in, void* out, std::size_t count, Type type, Op op, Comm* comm, void* stream) {
  return make(comm, {Opcode::kReduceScatter, bytes(in), bytes(out), count, type, op, 0, stream});
}

Result ncclAllGather(const void* in, void* out, std::size_t count, Type type, Comm* comm, void* stream) {
  return make(comm, {Opcode::kAllGather, bytes(in), bytes(out), count, type, 0, 0, stream});
}

Result ncclSend(const void* in, std::size_t count, Type type, int to, Comm* comm, void* stream) {
  return make(comm, {Opcode::kSend, bytes(in), nullptr, count, type, 0, to, stream});
}

Result ncclRecv(void* out, std::size_t count, Type type, int from, Comm* comm, void* stream) {
  return make(comm, {Opcode::kReceive, nullptr, bytes(out), count, type, 0, from, stream});
}
}
