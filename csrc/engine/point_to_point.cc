// Start and end of calls that send or receive. message_sends.cc and message_arrivals.cc have the rest.
#include "engine/point_to_point.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/keep.h"
#include "base/log.h"
#include "engine/control.h"
#include "engine/telling.h"

namespace sordino {

PointToPoint::PointToPoint(Common& common, ServiceHost& services)
    : common_(common), services_(services), rank_(common.transport.rank()) {}

std::shared_ptr<Handle> PointToPoint::submit(std::shared_ptr<Posting> posting) {
  posting->since = common_.clock.now();
  if (common_.trace.on()) posting->begun = std::chrono::steady_clock::now();
  std::shared_ptr<Handle> handle(posting, &posting->handle);
  std::lock_guard lock(mutex_);
  common_.failure.rethrow();  // if the world fails after this, end() finds the call
  unfinished_.fetch_add(1);
  submitted_.push_back(std::move(posting));
  submitted_any_ = true;
  return handle;
}

void PointToPoint::begin_submitted() {
  if (!submitted_any_.load()) return;
  std::vector<std::shared_ptr<Posting>> submitted;
  {
    std::lock_guard lock(mutex_);
    submitted.swap(submitted_);
    submitted_any_ = false;
  }
  std::size_t started = 0;
  try {
    for (; started < submitted.size(); ++started) {
      const std::shared_ptr<Posting>& one = submitted[started];
      if (is_removed(one->set)) {
        finish(*one, without_set(*one));
      } else {
        one->sends ? start_send(one) : start_receive(one);
      }
    }
  } catch (...) {  // end() ends the remaining calls
    std::lock_guard lock(mutex_);
    submitted_.insert(submitted_.begin(), submitted.begin() + static_cast<std::ptrdiff_t>(started), submitted.end());
    throw;
  }
}

bool PointToPoint::advance() {
  bool moved = submitted_any_.load();
  begin_submitted();
  moved |= read_boxes();
  if (queued_ > 0) {
    for (const auto& [to, out] : out_) moved |= flush(to);
  }
  if (!moving_.empty() || !given_up_.empty()) moved |= advance_transfers();
  if (removed_ != common_.removed_sets.size()) end_removed();
  return moved;
}

bool PointToPoint::is_near(int rank) const {
  const auto& node_of = common_.transport.node_of();
  return node_of[static_cast<std::size_t>(rank)] == node_of[static_cast<std::size_t>(rank_)] &&
         common_.transport.shares_memory();
}

void PointToPoint::post(int to, Writer& message) { common_.peers.post(to, message.take()); }

void PointToPoint::finish(Posting& posting, std::exception_ptr error) {
  if (posting.handle.done()) return;
  if (posting.begun != Time{} && common_.trace.on()) {
    common_.trace.span(posting.text(), posting.sends ? "SEND" : "RECV", posting.begun, std::chrono::steady_clock::now(),
                       posting.bytes);
  }
  unfinished_.fetch_sub(1);
  posting.handle.finish(std::move(error));
}

std::exception_ptr PointToPoint::departed(const Posting& posting, int rank) const {
  const Departure& departure = common_.peers.departure(rank);
  return std::make_exception_ptr(PeerLost(posting.text() + " needs " + departure.text, departure.lost));
}

// ---- transfers -----------------------------------------------------------------------------------------------------

bool PointToPoint::move(const std::shared_ptr<Posting>& posting, int peer,
                        const std::function<std::unique_ptr<Transfer>()>& begin) {
  try {
    moving_.push_back({posting, peer, begin()});
    return true;
  } catch (const PeerLost&) {
    finish(*posting, std::current_exception());
    if (!common_.peers.tolerates_losses()) throw;
    return false;
  } catch (...) {  // e.g. out of memory. The call is in no list now, so end() would not find it.
    finish(*posting, std::current_exception());
    throw;
  }
}

bool PointToPoint::advance_transfers() {
  bool moved = false;
  for (auto one = moving_.begin(); one != moving_.end();) {
    try {
      if (!one->transfer->test()) {
        ++one;
        continue;
      }
      finish(*one->posting);
      one = moving_.erase(one);
    } catch (const PeerLost&) {
      if (!common_.peers.tolerates_losses()) throw;
      give_up(*one, std::current_exception());
      given_up_.splice(given_up_.end(), moving_, one++);
    }
    moved = true;
  }
  std::erase_if(given_up_, [](Moving& one) {
    try {
      return one.transfer->test();
    } catch (const Error&) {
      return false;  // MPI may still use the memory, so the transfer stays
    }
  });
  return moved;
}

void PointToPoint::give_up(Moving& moving, std::exception_ptr error) {
  moving.posting->handle.given_up = true;
  finish(*moving.posting, std::move(error));
}

void PointToPoint::give_up_deserted(AwakeTime now) {
  for (auto one = moving_.begin(); one != moving_.end();) {
    const auto here = one++;
    if (!common_.peers.gone(here->peer)) continue;
    if (!here->deserted) here->deserted = now;
    if (seconds(*here->deserted, now) <= 1) continue;  // bytes sent before the rank left may still arrive
    give_up(*here, departed(*here->posting, here->peer));
    given_up_.splice(given_up_.end(), moving_, here);
  }
}

// ---- the ends of calls ---------------------------------------------------------------------------------------------

bool PointToPoint::is_without_source(const Posting& receive) const {
  const auto gone = [this](int rank) { return common_.peers.gone(rank); };
  if (receive.peer != Posting::kAnySource) return gone(receive.peer);
  return std::all_of(receive.sources.begin(), receive.sources.end(), gone);
}

void PointToPoint::lost(int rank) {
  if (rank == rank_) return;
  if (const auto found = in_.find(rank); found != in_.end()) {
    Incoming& in = found->second;
    if (in.box) read_box(rank);  // the rank may have sent messages before it left
    if (in.arriving && in.arriving->taker) finish(*in.arriving->taker, departed(*in.arriving->taker, rank));
    in.arriving.reset();
    in.box.reset();
    std::erase(boxes_, rank);
  }
  queues_.take_messages([rank](const Arrival& one) {
    return one.from == rank && (one.envelope.form == Envelope::Form::kAnnounced || !one.complete());
  });
  for (const auto& receive : queues_.take_receives([this](const Posting& one) { return is_without_source(one); }))
    finish(*receive, departed(*receive, rank));
  const auto found = out_.find(rank);
  if (found == out_.end()) return;
  Outgoing& out = found->second;
  queued_ -= static_cast<int>(out.queue.size());
  if (out.box) out.box->close();
  for (const auto& send : std::exchange(out.queue, {})) finish(*send, departed(*send, rank));
  for (const auto& [number, send] : std::exchange(out.announced, {})) finish(*send, departed(*send, rank));
}

std::exception_ptr PointToPoint::without_set(const Posting& posting) {
  return std::make_exception_ptr(UsageError("process set " + std::to_string(posting.set) +
                                            " was removed before this call was over: " + posting.text()));
}

void PointToPoint::end_removed() {
  removed_ = common_.removed_sets.size();
  for (const auto& one : queues_.take_receives([this](const Posting& one) { return is_removed(one.set); }))
    finish(*one, without_set(*one));
  for (auto& [to, out] : out_) {
    std::vector<std::shared_ptr<Posting>> ended;
    std::erase_if(out.queue, [&](const std::shared_ptr<Posting>& send) {
      if (!is_removed(send->set)) return false;
      ended.push_back(send);
      return true;
    });
    queued_ -= static_cast<int>(ended.size());
    for (const auto& send : ended) finish(*send, without_set(*send));
  }
  for (const auto& message :
       queues_.take_messages([this](const Arrival& one) { return is_removed(one.envelope.set) && one.complete(); }))
    drop(*message);
}

// Ends a message that no receive will take, because its set has been removed.
void PointToPoint::drop(const Arrival& message) {
  if (message.envelope.form == Envelope::Form::kWhole) {
    give_back(message.from, cost(message.envelope));
  } else if (message.own) {
    finish(*message.own, without_set(*message.own));
  } else {
    post(message.from, Writer()
                           .put(Message::kMessage)
                           .put(Word::kRefused)
                           .put(message.envelope.number)
                           .put(Refusal::kRemoved)
                           .put(std::string()));
  }
}

void PointToPoint::end(const std::exception_ptr& why) {
  std::vector<std::shared_ptr<Posting>> ended;
  {
    std::lock_guard lock(mutex_);
    ended.swap(submitted_);
    submitted_any_ = false;
  }
  const auto take = [&ended](auto&& more) { ended.insert(ended.end(), more.begin(), more.end()); };
  take(queues_.take_receives([](const Posting&) { return true; }));
  for (const auto& message : queues_.take_messages([](const Arrival&) { return true; })) {
    if (message->own) ended.push_back(message->own);
  }
  for (auto& [to, out] : out_) {
    if (out.box) out.box->close();
    take(std::exchange(out.queue, {}));
    for (const auto& [number, send] : std::exchange(out.announced, {})) ended.push_back(send);
    if (!out.refused.empty()) log::say(log::Level::kWarning, rank_, std::exchange(out.refused, {}) + ".");
  }
  queued_ = 0;
  for (auto& [from, in] : in_) {
    if (in.arriving && in.arriving->taker) ended.push_back(in.arriving->taker);
    in.arriving.reset();
    in.box.reset();
  }
  boxes_.clear();
  for (const auto& one : ended) finish(*one, why);
  for (Moving& one : moving_) give_up(one, why);
  given_up_.splice(given_up_.end(), moving_);
}

void PointToPoint::visit(const std::function<void(Posting&, const std::vector<int>&)>& visitor) {
  const auto one_peer = [&](Posting& one) {
    std::vector<int> missing;
    if (one.peer != Posting::kAnySource) {
      missing.push_back(one.peer);
    } else {
      std::copy_if(one.sources.begin(), one.sources.end(), std::back_inserter(missing),
                   [this](int rank) { return !common_.peers.gone(rank); });
    }
    visitor(one, missing);
  };
  queues_.visit(one_peer, [&](Arrival& message) {
    if (message.own) one_peer(*message.own);
  });
  for (auto& [to, out] : out_) {
    for (const auto& send : out.queue) one_peer(*send);
    for (const auto& [number, send] : out.announced) one_peer(*send);
  }
  for (Moving& one : moving_) visitor(*one.posting, {one.peer});
  for (const auto& [from, in] : in_) {
    if (in.arriving && in.arriving->taker) visitor(*in.arriving->taker, {from});
  }
}

std::string PointToPoint::text_of(const Handle& handle) {
  std::string text;
  visit([&](Posting& one, const std::vector<int>&) {
    if (&one.handle == &handle) text = one.text();
  });
  std::lock_guard lock(mutex_);
  for (const auto& one : submitted_) {
    if (&one->handle == &handle) text = one->text();
  }
  return text;
}

void PointToPoint::leave_boxes() {
  for (auto& [to, out] : out_) {
    out.box.reset();
    if (out.segment) common_.transport.keep(std::move(out.segment));
  }
}

void PointToPoint::keep() { leak_intentionally(std::move(given_up_)); }

}  // namespace sordino
