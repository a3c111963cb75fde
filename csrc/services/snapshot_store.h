// Snapshots of some memory that others take whenever they like. Whoever owns the memory publishes it, in one copy, when
// it is whole; whoever wants it pulls the newest snapshot, and the owner's threads have no part in it but to move
// bytes.
//
// Within a node whoever pulls copies a snapshot itself (snapshots.h). From another node it sends a request, and the
// owner answers with one contiguous snapshot, whose place is not written until it has left. If both other places are on
// their way, publishing leaves the newest snapshot as it is: who publishes never waits.
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

// One snapshot that is being, or has been, pulled. What is not atomic may be read once `state` has left kUnderWay.
struct Pull {
  enum class State { kArmed, kUnderWay, kDone, kFailed };
  int peer = -1;
  std::uint64_t number = 0;
  Time start{};  // when it is to begin
  std::atomic<State> state{State::kArmed};
  std::string failure;
  Time begun{}, ended{};
  std::uint64_t version = 0;  // of the snapshot: how often its owner had published
  std::uint64_t steps = 0;    // what its owner said of it
  double age = 0;             // of the snapshot, in seconds: when the pull began (within a node), or when it was sent
  std::unique_ptr<std::byte[]> values;
};

class SnapshotStore : public Service {
 public:
  // `mailbox` gets kDone with the number of each pull that ends. Throws TransportError without memory.
  SnapshotStore(ServiceContext& context, int number, std::shared_ptr<const Layout> layout,
                std::shared_ptr<Mailbox> mailbox);
  // What transfers may still touch stays for ever.
  ~SnapshotStore() override;

  // Where node peers find the snapshots; they are to be told by connect(), before anybody pulls.
  Location location() const { return location_; }
  void connect(int rank, const Location& location);

  // Copies `source`, a layout's worth of bytes. False if there was no place for it. From one thread at a time.
  bool publish(const std::byte* source, std::uint64_t steps);

  // Pulls from `peer`, beginning at `start` (on this rank's steady clock).
  std::shared_ptr<Pull> pull(int peer, Time start);
  // Leaves a pull, if it has not ended.
  void cancel(const std::shared_ptr<Pull>& pull);
  // values = (values + what was pulled) / 2. Gives the pull's memory back; UsageError if it is not done.
  void average(Pull& pull, std::byte* values);
  // Gives back the memory of a pull that nobody needs.
  void discard(Pull& pull);

  // Publications that found no place.
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
    bool here = false;  // the values have
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
  std::vector<Location> locations_;  // of the ranks; segment 0 for those that share no memory with this one

  std::mutex mutex_;  // guards what pull() shares with advance(): all below
  std::deque<std::shared_ptr<Pull>> armed_;
  std::vector<std::shared_ptr<Pull>> cancelled_;
  std::vector<std::unique_ptr<std::byte[]>> spare_;
  bool ended_ = false;
  std::atomic<bool> published_{false};
  std::atomic<std::uint64_t> unpublished_{0};
  std::uint64_t next_number_ = 0;

  // Of the thread that polls.
  std::vector<bool> closed_;  // ranks that answer no more
  std::list<Sending> sendings_;
  std::list<Receiving> receivings_;
  std::vector<Request> early_;      // came before anything was published
  std::list<Receiving> abandoned_;  // may still be written to
};

}  // namespace sordino
