"""Errors of the core (csrc/)."""

from __future__ import annotations

from planted.error import Error, checks, tests

_TOPOLOGY = "csrc/topology/topology.cc"
_EXCHANGE = "csrc/collectives/exchange.cc"
_NEGOTIATION = "csrc/collectives/negotiation.cc"
_NODE = "csrc/collectives/allreduce_node.cc"
_MESSAGES = "csrc/collectives/allreduce_messages.cc"
_SHELF = "csrc/collectives/shelf.cc"
_PAIRS = "csrc/collectives/pair_averaging.cc"
_NCCL = "csrc/collectives/nccl_operations.cc"
_UNCHANGED = "csrc/kernels/unchanged.cc"
_AGREEMENT = "csrc/membership/agreement.cc"

_TOPOLOGIES = (tests("topology", "destinations or rows or exponential or combo or serve"),)
_GOSSIP = (checks("gossip.an_exchange or gossip.two_workers or gossip.buffers"),)
_ALLREDUCE = (checks("allreduce.every_op or allreduce.megabytes or allreduce.odd_lengths"),)
_SERVICES = ("cpp.test_services", checks("wide_area"))
_LEFT = ("tests/faults/test_after_losses.py tests/faults/test_random_faults.py",)

ERRORS = [
    # ---- messages
    Error(
        "the end of an endless message is waited for",
        "lost message",
        "csrc/transport/shm/shm.cc",
        "plausible = size <= kMostBytes;",
        "plausible = true;",
        ("cpp.test_fuzz",),
    ),
    # ---- who mixes with whom
    Error(
        "exponential repeats peers",
        "swapped rank",
        _TOPOLOGY,
        "const std::uint64_t first = at.round * static_cast<std::uint64_t>(peers);",
        "const std::uint64_t first = at.round;",
        _TOPOLOGIES,
    ),
    Error(
        "exponential pulls from whom it pushes to",
        "swapped rank",
        _TOPOLOGY,
        "source = (rank + size() - source) % size();",
        "source = (rank + source) % size();",
        _TOPOLOGIES,
    ),
    Error(
        "groups take for ranks what are groups",
        "swapped rank",
        _TOPOLOGY,
        "  for (int& source : row.sources) source *= group_size_;\n",
        "",
        _TOPOLOGIES,
    ),
    Error(
        "a server counts itself",
        "wrong weight",
        _TOPOLOGY,
        "row.scale = 1.0 / static_cast<double>(workers());",
        "row.scale = 1.0 / static_cast<double>(workers() + 1);",
        _TOPOLOGIES,
    ),
    Error(
        "combo pulls from itself",
        "off by one",
        _TOPOLOGY,
        "row.sources.push_back(other < rank ? other : other + 1);",
        "row.sources.push_back(other <= rank ? other : other + 1);",
        _TOPOLOGIES,
    ),
    Error(
        "one distance too many",
        "off by one",
        _TOPOLOGY,
        "static_cast<unsigned>(std::max(size, 1)) - 1));",
        "static_cast<unsigned>(std::max(size, 1))));",
        _TOPOLOGIES,
    ),
    # ---- exchanges
    Error(
        "each rank adds up in its own order",
        "wrong order of summation",
        _EXCHANGE,
        "    std::sort(average.of.begin(), average.of.end(),\n"
        "              [&](int a, int b) { return participant(plan, a) < participant(plan, b); });\n",
        "",
        (*_GOSSIP, "cpp.test_exchange"),
    ),
    Error(
        "what is sent is counted twice",
        "wrong weight",
        _EXCHANGE,
        "if (row.keeps_own && !what_.without_own) average.of",
        "if (row.keeps_own) average.of",
        (checks("push_sum.a_push"),),
    ),
    Error(
        "two senders write to one copy",
        "wrong bucket",
        _EXCHANGE,
        "plan.receives.push_back({source, needed_by, copy});",
        "plan.receives.push_back({source, needed_by, 0});",
        _GOSSIP,
    ),
    Error(
        "each segment lies in the inbox where the first does",
        "wrong bucket",
        _EXCHANGE,
        "parcel.copy * strides_[owner] + plan.places[index][owner] + skip",
        "parcel.copy * strides_[owner] + skip",
        _GOSSIP,
    ),
    Error(
        "results are read before they are there",
        "missing wait",
        _EXCHANGE,
        "          if (parcel.here == team_.me) co_await team_.finished(**receive++, parcel.peer);",
        "          if (parcel.here == team_.me) ++receive;",
        _GOSSIP,
    ),
    # ---- agreeing on operations
    Error(
        "a new set gets the number of an old one",
        "off by one",
        _NEGOTIATION,
        "std::int64_t{pending.said[member]->root} + 1);",
        "std::int64_t{pending.said[member]->root});",
        (checks("process_sets"),),
    ),
    Error(
        "other folds are fused",
        "wrong bucket",
        _NEGOTIATION,
        "if (fusible && fusing_ && fusing_->op == what.op && fusing_->prescale",
        "if (fusible && fusing_ && fusing_->prescale",
        ("cpp.test_negotiation", checks("agreement or allreduce.groups")),
    ),
    Error(
        "who joins does not complete what others wait for",
        "lost message",
        _NEGOTIATION,
        "    last_joined_ = members_[member];\n"
        "    for (const auto& [name, pending] : pending_) ripe_.push_back(name);\n",
        "    last_joined_ = members_[member];\n",
        ("cpp.test_negotiation", checks("joining")),
    ),
    Error(
        "who announced and left is waited for",
        "lost message",
        _NEGOTIATION,
        "if (gone_[member] && (pending.said[member] || !joined_[member])) return true;",
        "if (gone_[member] && !pending.said[member] && !joined_[member]) return true;",
        ("cpp.test_negotiation", tests("orders", "before_it_left")),
    ),
    Error(
        "process sets share tags",
        "wrong bucket",
        "csrc/collectives/process_set.cc",
        "return static_cast<Tag>(set % kTagSets) << kTagSequenceBits |\n         static_cast<Tag>",
        "return static_cast<Tag>",
        (checks("process_sets"),),
    ),
    # ---- all-reduce
    Error(
        "a rank copies its own slot for each peer's",
        "swapped rank",
        _NODE,
        "slot_of(peer, chunk) + begin * width_);",
        "slot_of(me_, chunk) + begin * width_);",
        _ALLREDUCE,
    ),
    Error(
        "a shard is folded before peers have copied in",
        "missing wait",
        _NODE,
        "    co_await team.all_reached(&Desk::offered, Staging::stage(chunk));\n",
        "",
        _ALLREDUCE,
    ),
    Error(
        "a slot is used again too soon",
        "missing wait",
        _NODE,
        "co_await team.all_reached(&Desk::finished, Staging::stage(chunk + 1 - Desk::kSlots));",
        "co_await team.all_reached(&Desk::finished, Staging::stage(0));",
        _ALLREDUCE,
    ),
    Error(
        "the ring folds into the part that it sends",
        "off by one",
        _MESSAGES,
        "const auto own = part(team.me - step - 1);",
        "const auto own = part(team.me - step);",
        _ALLREDUCE,
    ),
    Error(
        "float16 is divided after the sum",
        "wrong weight",
        _MESSAGES,
        "pre *= std::exchange(post, 1.0);",
        "pre *= 1.0;",
        (tests("orders", "float16"),),
    ),
    Error(
        "adasum takes away twice as much of the second",
        "wrong weight",
        _MESSAGES,
        "dots.xy / (2 * dots.yy)",
        "dots.xy / dots.yy",
        (checks("adasum"),),
    ),
    Error(
        "beyond a power of two nobody is added",
        "lost message",
        _MESSAGES,
        "    co_await team.finished(*receiving, team.me + power);\n"
        "    co_await merge(data.data(), theirs.data(), data.data());\n",
        "    co_await team.finished(*receiving, team.me + power);\n",
        _ALLREDUCE,
    ),
    Error(
        "a part of a reduction begins with one's own",
        "wrong order of summation",
        "csrc/collectives/rearrange.cc",
        "sources.push_back(arrived.get() + index * size_at(me));",
        "sources.push_back(arrived.get() + (me + index) % parts * size_at(me));",
        (checks("moving.reducescatter"),),
    ),
    Error(
        "a shard begins with its owner's",
        "wrong order of summation",
        _NODE,
        "sources_[peer] = peer == me_ ? input : slot_of(peer, chunk) + at;",
        "sources_[(peer + sources_.size() - me_) % sources_.size()] = peer == me_ ? input : slot_of(peer, chunk) + at;",
        (checks("allreduce.one_node"),),
    ),
    # ---- pulls, and averaging in pairs
    Error(
        "a snapshot on its way is written over",
        "stale copy",
        _SHELF,
        "if (place == newest || pins_[static_cast<std::size_t>(place)] > 0) continue;",
        "if (place == newest) continue;",
        _SERVICES,
    ),
    Error(
        "who asks before the first snapshot is forgotten",
        "lost message",
        _SHELF,
        "    early_.push_back(request);\n",
        "",
        _SERVICES,
    ),
    Error(
        "a place stays taken after it was sent",
        "forgotten rollback",
        _SHELF,
        "    std::lock_guard lock(mutex_);\n"
        "    --pins_[static_cast<std::size_t>(sending->place)];\n"
        "    sending = sendings_.erase(sending);",
        "    sending = sendings_.erase(sending);",
        _SERVICES,
    ),
    Error(
        "a shelf forgets who has closed",
        "lost message",
        _SHELF,
        "  closed_[static_cast<std::size_t>(rank)] = true;\n",
        "",
        _SERVICES,
    ),
    Error(
        "a step meanwhile is lost",
        "stale copy",
        _PAIRS,
        "const bool untouched = averaging.changes == changes_;",
        "const bool untouched = averaging.copied;",
        _SERVICES,
    ),
    Error(
        "all of the difference is taken away, and half of it added",
        "wrong weight",
        _PAIRS,
        "kernels::axpby(run.dtype, out, mine, count, -0.5, 1.0);",
        "kernels::axpby(run.dtype, out, mine, count, -1.0, 1.0);",
        _SERVICES,
    ),
    Error(
        "an averaging is over when it is sent",
        "missing wait",
        _PAIRS,
        "return sent && received;",
        "return sent || received;",
        _SERVICES,
    ),
    # ---- memory, and kernels
    Error(
        "segments begin where the last one ends",
        "wrong bucket",
        "csrc/arena/layout.cc",
        "const std::size_t offset = same ? bytes_ : align(bytes_);",
        "const std::size_t offset = bytes_;",
        ("cpp.test_arena", tests("layout")),
    ),
    Error(
        "layouts of other groups have one hash",
        "wrong bucket",
        "csrc/arena/layout.cc",
        "  for (std::size_t index = 0; index < tensors_.size(); ++index) fnv.add(std::to_string(group_of(index)));\n",
        "",
        ("cpp.test_arena", tests("layout")),
    ),
    Error(
        "results are mixed that are to be read yet",
        "stale copy",
        "csrc/kernels/mix.cc",
        "const bool direct = !clashes(inputs, outputs, averages);",
        "const bool direct = true;",
        ("cpp.test_kernels", *_GOSSIP),
    ),
    Error(
        "the third is added before the second",
        "wrong order of summation",
        "csrc/kernels/cpu/impl.h",
        "    if constexpr (kSources > 1) value = Op::apply(value, read(s1));\n"
        "    if constexpr (kSources > 2) value = Op::apply(value, read(s2));\n",
        "    if constexpr (kSources > 2) value = Op::apply(value, read(s2));\n"
        "    if constexpr (kSources > 1) value = Op::apply(value, read(s1));\n",
        ("cpp.test_kernels",),
    ),
    Error(
        "all items are sampled alike",
        "wrong bucket",
        _UNCHANGED,
        "const std::uint64_t item_key = rng::key(key, item++);",
        "const std::uint64_t item_key = rng::key(key, item);",
        ("cpp.test_unchanged",),
    ),
    Error(
        "counters do not age",
        "stale copy",
        _UNCHANGED,
        "counters[i] /= 2;",
        "counters[i] /= 1;",
        ("cpp.test_unchanged",),
    ),
    Error(
        "the first block of samples is compared again and again",
        "off by one",
        _UNCHANGED,
        "indices + (row.first_sample + begin) * sizeof(std::uint32_t)",
        "indices + row.first_sample * sizeof(std::uint32_t)",
        ("cpp.test_unchanged", tests("unchanged")),
    ),
    # ---- membership
    Error(
        "a leader needs no majority of promises",
        "quorum of one too few",
        _AGREEMENT,
        "    if (!most(promised)) return;\n",
        "",
        ("cpp.test_agreement",),
    ),
    Error(
        "half of the ranks are most of them",
        "quorum of one too few",
        "csrc/membership/agreement.h",
        "return 2 * count > alive().size();",
        "return 2 * count >= alive().size();",
        ("cpp.test_agreement",),
    ),
    Error(
        "any accepted view is taken up",
        "stale copy",
        _AGREEMENT,
        "if (promise.view && promise.accepted > highest) {",
        "if (promise.view) {",
        ("cpp.test_agreement",),
    ),
    Error(
        "a promise is forgotten",
        "quorum of one too few",
        _AGREEMENT,
        "    promised_ = ballot;\n    writer",
        "    writer",
        ("cpp.test_agreement",),
    ),
    Error(
        "who promises does not say what it has accepted",
        "lost message",
        _AGREEMENT,
        "promised_ = accepted_ = ballot;",
        "promised_ = ballot;",
        ("cpp.test_agreement",),
    ),
    Error(
        "tags of the last epoch are used again",
        "wrong bucket",
        _AGREEMENT,
        "    view.first_tag = std::max(view.first_tag, promise.next_tag);\n",
        "",
        ("cpp.test_agreement",),
    ),
    Error(
        "messages of the next epoch are dropped",
        "lost message",
        "csrc/membership/membership.cc",
        "    held_.push_back({from, of, Bytes(message.begin(), message.end())});",
        "    return;",
        _LEFT,
    ),
    Error(
        "the dead are asked in the next epoch, too",
        "lost message",
        "csrc/membership/membership.cc",
        "  for (const auto& [rank, cause] : dead_) agreement_->bury(rank, cause);\n",
        "",
        ("tests/faults/test_surviving.py -k 'another_is_missed or attrition'", *_LEFT),
    ),
    # ---- progress, and transports
    Error(
        "a waiter that is served counts as waiting",
        "forgotten rollback",
        "csrc/progress/progress.cc",
        "  waiters_.fetch_sub(1);\n",
        "",
        ("cpp.test_progress", checks("agreement.a_handle")),
    ),
    Error(
        "any message of a rank will do",
        "wrong bucket",
        "csrc/transport/sim/sim.cc",
        "if ((*parcel)->from != from_ || (*parcel)->tag != tag_) continue;",
        "if ((*parcel)->from != from_) continue;",
        ("cpp.test_transport", checks("process_sets")),
    ),
    Error(
        "letters are written over those that are not read",
        "lost message",
        "csrc/transport/shm/shm.cc",
        "room = Ring::kBytes - (written - box.read.load(std::memory_order_acquire));",
        "room = Ring::kBytes - written % Ring::kBytes;",
        ("cpp.test_transport",),
    ),
    Error(
        "a letter waits for the next one",
        "off by one",
        "csrc/transport/shm/shm.cc",
        "if (stream.size() - taken - sizeof(size) < size) break;",
        "if (stream.size() - taken - sizeof(size) <= size) break;",
        ("cpp.test_transport",),
    ),
    # ---- NCCL
    Error(
        "an average is divided again",
        "wrong weight",
        _NCCL,
        "      this->op = ReduceOp::kAverage;\n      this->post = 1;\n",
        "      this->op = ReduceOp::kAverage;\n",
        ("cpp.test_nccl_operations",),
    ),
    Error(
        "what is received is placed by what is sent",
        "wrong bucket",
        _NCCL,
        "      input += out;\n      output += in;",
        "      input += out;\n      output += out;",
        ("cpp.test_nccl_operations",),
    ),
    Error(
        "parts beyond the largest call are left out",
        "off by one",
        _NCCL,
        "for (std::size_t begin = 0; begin < pieces.count(); begin += step) {",
        "for (std::size_t begin = 0; begin + step <= pieces.count(); begin += step) {",
        ("cpp.test_nccl_operations",),
    ),
]
