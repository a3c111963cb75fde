// Store of snapshots of one rank's memory, which other ranks pull at any time. The owner publishes its memory, by one
// copy, when the memory is consistent. A reader pulls the newest snapshot, without a call of the owner's program.
//
// Within a node, the reader copies a snapshot itself (snapshots.h). From another node, it sends a request, and the
// owner answers with one contiguous snapshot. The place of that snapshot is not overwritten until the snapshot is sent.
// If both other places are still being sent, publish() does nothing, so the publishing thread never waits.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena/layout.h"
#include "services/mailbox.h"
#include "services/service.h"
#include "services/service_context.h"
#include "services/snapshots.h"

namespace sordino {

// A pull of one snapshot. Other threads may read members that are not atomic once `state` is kDone or kFailed.
struct Pull {
  enum class State { kArmed, kUnderWay, kDone, kFailed };
  int peer = -1;
  std::uint64_t number = 0;
  Time start{};  // earliest time to begin
  std::atomic<State> state{State::kArmed};
  std::string failure;
  Time begun{}, ended{};
  std::uint64_t version = 0;  // number of its owner's publications up to this one
  std::uint64_t steps = 0;    // argument of the owner's publish()
  double age = 0;             // in seconds, when the pull began (within a node) or the owner sent the snapshot
  std::unique_ptr<std::byte[]> values;
};

class SnapshotStore : public Service {
 public:
  // `mailbox` gets kDone with the number of each pull that ends, except pulls that are cancelled before they begin.
  // Throws TransportError if there is no memory.
  SnapshotStore(ServiceContext& context, int number, std::shared_ptr<const Layout> layout,
                std::shared_ptr<Mailbox> mailbox);
  // Leaks memory that transfers may still use.
  ~SnapshotStore() override;

  // Location of the snapshots for node peers, which pass it to connect() before any rank pulls.
  Location location() const { return location_; }
  void connect(int rank, const Location& location);

  // Copies `source` (layout->bytes() bytes). Returns false if no place was free. Called by one thread at a time.
  bool publish(const std::byte* source, std::uint64_t steps);

  // Pulls from `peer`, no earlier than `start` (on this rank's steady clock). After end(), returns a failed pull.
  std::shared_ptr<Pull> pull(int peer, Time start);
  // Cancels a pull, if it has not ended.
  void cancel(const std::shared_ptr<Pull>& pull);
  // values = (values + pulled values) / 2. Takes back the pull's memory. Throws UsageError if the pull is not done.
  void average(Pull& pull, std::byte* values);
  // Takes back the memory of a pull that has ended and whose values are not needed.
  void discard(Pull& pull);

  // Number of calls of publish() that found no free place.
  std::uint64_t unpublished() const { return unpublished_.load(); }

  void receive(int from, Reader& reader) override;
  bool advance(Time now) override;
  void lost(int rank) override;
  void end(std::exception_ptr why) override;
  bool settled() const override;

 private:
  struct Sending {
    int place;
    std::unique_ptr<Transfer> transfer;
  };
  struct Request {
    int from;
    std::uint64_t number;
    Tag tag;
  };
  struct Receiving {
    std::shared_ptr<Pull> pull;
    std::unique_ptr<Transfer> transfer;
    bool told = false;  // the header has come
    bool here = false;  // the values have come
  };

  bool advance_armed(Time now);
  bool advance_sendings();
  bool advance_receivings();
  void begin(const std::shared_ptr<Pull>& pull, Time now);
  bool copy_from(std::byte* base, Pull& pull) const;
  void answer(const Request& request, Time now);
  void abandon(std::list<Receiving>::iterator receiving, const std::string& why);
  void finish(const std::shared_ptr<Pull>& pull, Pull::State state, const std::string& failure = {});
  std::unique_ptr<std::byte[]> take_memory();
  void put_memory(std::unique_ptr<std::byte[]> memory);

  ServiceContext& context_;
  const int number_;
  const std::shared_ptr<const Layout> layout_;
  const std::shared_ptr<Mailbox> mailbox_;
  Snapshots snapshots_;
  const Location location_;
  std::vector<Location> locations_;  // by rank; segment 0: the rank shares no memory with this one

  std::mutex mutex_;  // guards the next four members and next_number_, which pull() shares with advance()
  std::deque<std::shared_ptr<Pull>> armed_;
  std::vector<std::shared_ptr<Pull>> cancelled_;
  std::vector<std::unique_ptr<std::byte[]>> spare_;
  bool ended_ = false;
  std::atomic<bool> published_{false};
  std::atomic<std::uint64_t> unpublished_{0};
  std::uint64_t next_number_ = 0;

  // Used by the polling thread only.
  std::vector<bool> closed_;  // by rank: whether it no longer answers
  std::list<Sending> sendings_;
  std::list<Receiving> receivings_;
  std::vector<Request> early_;      // requests before the first publication
  std::list<Receiving> abandoned_;  // transfers may still write to their memory
};

}  // namespace sordino
