"""Collectives among some of the ranks."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import time
from pathlib import Path

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.reference import assert_equal, assert_reduced, values
from checks.registry import Seat, check
from sordino.errors import OperationMismatch, UsageError
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet, new_set_id, remove_set


def halves(seat: Seat) -> tuple[list[int], list[int]]:
    return list(range(0, seat.size, 2)), list(range(1, seat.size, 2))


@check()
def the_set_of_all(seat: Seat) -> None:
    everybody = hvd.global_process_set
    assert everybody.process_set_id == 0
    assert everybody.ranks == list(range(seat.size))
    assert everybody.size() == seat.size and everybody.rank() == seat.rank and everybody.included()
    assert hvd.remove_process_set(everybody) is False
    raises(UsageError, "duplicate", hvd.add_process_set, list(range(seat.size)))


@check(least=2, quick=("direct-2",))
def first_reductions_beside_broadcasts(seat: Seat) -> None:
    """A set's first reduction on a GPU tests how its ranks reach each other. The test does not change memory of other
    operations, which the device may still read."""
    rows = torch.arange(600.0).view(300, 2)
    for turn in range(30):
        everybody = ProcessSet(list(range(seat.size)))
        everybody.process_set_id = new_set_id(everybody.ranks)
        given = hvd.broadcast_async(rows + turn, seat.last, process_set=everybody)
        reduced = hvd.allreduce_async(rows, process_set=everybody)
        assert_equal(hvd.synchronize(given), rows + turn)
        assert_equal(hvd.synchronize(reduced), rows)
        remove_set(everybody.process_set_id)


@check(least=2)
def every_operation_in_two_sets_at_once(seat: Seat) -> None:
    even, odd = (hvd.add_process_set(ranks) for ranks in halves(seat))
    mine = even if seat.rank % 2 == 0 else odd
    members = mine.ranks
    me = members.index(seat.rank)
    given = {"process_set": mine}
    inputs = [values(rank, (len(members) * 3, 4), torch.float64) for rank in members]
    own = inputs[me]
    assert_reduced(hvd.allreduce(own, **given), hvd.Average, inputs)
    assert_reduced(hvd.allreduce(own, op=hvd.Max, **given), hvd.Max, inputs)
    for tensor in hvd.grouped_allreduce([own, own], op=hvd.Sum, **given):
        assert_reduced(tensor, hvd.Sum, inputs)
    assert_equal(hvd.allgather(own[: me + 1], **given), torch.cat([t[: i + 1] for i, t in enumerate(inputs)]))
    for index, root in enumerate(members):  # the root is a world rank
        assert_equal(hvd.broadcast(own, root, **given), inputs[index])
    assert_equal(hvd.alltoall(own, **given), torch.cat([t[3 * me : 3 * me + 3] for t in inputs]))
    assert_reduced(hvd.reducescatter(own, op=hvd.Sum, **given), hvd.Sum, [t[3 * me : 3 * me + 3] for t in inputs])
    for length in (70_000, 300_000):
        large = [values(rank, length, torch.float32) for rank in members]
        shared = hvd.shared_empty(length).copy_(large[me])
        hvd.allreduce_(shared, **given)
        assert_reduced(shared, hvd.Average, large)
    hvd.barrier(process_set=mine)
    assert hvd.broadcast_object({"from": seat.rank}, members[-1], process_set=mine) == {"from": members[-1]}
    assert hvd.allgather_object(seat.rank, process_set=mine) == members
    assert hvd.remove_process_set(odd) and hvd.remove_process_set(even)
    assert even.process_set_id is None and not hvd.remove_process_set(even)


@check(least=2)
def those_who_are_not_members(seat: Seat) -> None:
    alone = hvd.add_process_set([seat.last])
    assert alone.size() == 1 and alone.included() == (seat.rank == seat.last)
    if alone.included():
        assert alone.rank() == 0
        assert hvd.allreduce(torch.tensor(5.0), process_set=alone).item() == 5
        raises(UsageError, "root", hvd.broadcast, torch.ones(1), 0, process_set=alone)
    else:
        raises(UsageError, "not part", alone.rank)
        for call in (
            hvd.allreduce,
            hvd.allreduce_,
            hvd.allgather,
            hvd.alltoall,
            hvd.reducescatter,
            hvd.allreduce_async,
        ):
            raises(UsageError, "not a member", call, torch.ones(2), process_set=alone)
        raises(UsageError, "not a member", hvd.broadcast, torch.ones(1), seat.last, process_set=alone)
        raises(UsageError, "not a member", hvd.barrier, process_set=alone)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size
    hvd.remove_process_set(alone)
    raises(UsageError, "registered", hvd.allreduce, torch.ones(1), process_set=alone)


@check(least=3)
def overlapping_sets_at_once(seat: Seat) -> None:
    """Rank 1 is in both sets; each rank submits in its own order."""
    left, right = hvd.add_process_set([0, 1]), hvd.add_process_set(list(range(1, seat.size)))
    for turn in range(10):
        handles = []
        for _name, one in sorted({"left": left, "right": right}.items(), reverse=(turn + seat.rank) % 2 == 0):
            if one.included():
                for i in range(3):
                    length = 40_000 if i == 1 else 10
                    tensor = torch.full((length,), float(seat.rank))
                    handles.append((one, hvd.allreduce_async(tensor, name=f"{i}", op=hvd.Sum, process_set=one)))
        handles.append(
            (hvd.global_process_set, hvd.allreduce_async(torch.tensor([float(seat.rank)]), op=hvd.Sum, name="all"))
        )
        for one, handle in reversed(handles) if seat.rank % 2 else handles:
            assert (hvd.synchronize(handle) == sum(one.ranks)).all()
    assert hvd.remove_process_set(left) and hvd.remove_process_set(right)


@check(worlds=("sim-5x2", "mpi-4x2"))
def sets_with_two_ranks_in_common(seat: Seat) -> None:
    """Messages between the two common ranks belong to one set or the other, in any order of arrival."""
    sets = [hvd.add_process_set([0, 1, 2]), hvd.add_process_set([1, 2, 3])]
    for turn in range(40):
        handles = []
        for number in (0, 1) if (turn + seat.rank) % 2 else (1, 0):
            if sets[number].included():
                tensor = torch.full((5_000,), float(seat.rank + 10 * number))
                handle = hvd.allreduce_async(tensor, name=f"{turn}", op=hvd.Sum, process_set=sets[number])
                handles.append((number, handle))
        for number, handle in handles:
            assert (hvd.synchronize(handle) == sum(rank + 10 * number for rank in sets[number].ranks)).all()
    for one in reversed(sets):
        assert hvd.remove_process_set(one)


@check(least=2)
def many_sets_one_after_another(seat: Seat) -> None:
    """Identifiers of removed sets do not disturb later sets, also beyond 256, where tags begin to repeat."""
    seen = set()
    for turn in range(270):
        ranks = [turn % seat.size]
        one = hvd.add_process_set(ranks)
        seen.add(one.process_set_id)
        if turn % 30 == 0 and one.included():
            assert hvd.allreduce(torch.tensor(float(turn)), process_set=one).item() == turn
        assert hvd.remove_process_set(one)
    assert current().world.sets() == [0]
    seat.same("ids", sorted(seen))


def shared_memory() -> tuple[int, int, int]:
    """Return the allocated bytes of this process's shared segments, the number of segments, and the number of
    mappings."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the file was closed meanwhile
            if "memfd:sordino" in os.readlink(entry):
                found.append(entry.stat().st_blocks * 512)
    maps = Path("/proc/self/maps").read_text().count("memfd:sordino")
    return sum(found), len(found), maps


@check(least=2, on=("processes",))
def unused_sets_cost_kilobytes_and_removed_ones_nothing(seat: Seat) -> None:
    ranks = list(range(seat.size))

    def use_a_set() -> None:
        one = ProcessSet(ranks)
        one.process_set_id = new_set_id(ranks)
        assert hvd.allreduce(torch.ones(20_000), op=hvd.Sum, process_set=one)[0] == seat.size
        remove_set(one.process_set_id)

    use_a_set()  # pipes between ranks are created by their first transfer, and stay
    time.sleep(0.1)
    seat.meet("used")
    before = shared_memory()
    sets = [new_set_id(ranks) for _ in range(20)]
    seat.meet("added")
    after = shared_memory()
    assert after[0] - before[0] <= 20 * 8192, (before, after)
    for one in sets:
        remove_set(one)
    for _ in range(100):
        use_a_set()
    limit = time.monotonic() + 100
    # Peers unmap memory when they learn that it is freed, which may also be memory of earlier operations.
    while any(now > former for now, former in zip(shared_memory(), before)):
        assert time.monotonic() < limit, (before, shared_memory())
        time.sleep(0.01)
    seat.meet("unmapped")


@check(least=4)
def many_sets_together(seat: Seat) -> None:
    pairs = [[a, b] for a in range(seat.size) for b in range(a + 1, seat.size)]
    sets = [hvd.add_process_set(pair) for pair in pairs]
    mine = [one for one in sets if one.included()]
    handles = [
        hvd.allreduce_async(torch.full((20_000,), float(seat.rank)), op=hvd.Sum, process_set=one, name="p")
        for one in mine
    ]
    for one, handle in zip(mine, handles):
        assert (hvd.synchronize(handle) == sum(one.ranks)).all()
    for one in sets:
        assert hvd.remove_process_set(one)


@check(least=2)
def unnamed_operations_of_members_only(seat: Seat) -> None:
    """Members call operations that the others do not call. Unnamed operations of all ranks still match."""
    some = hvd.add_process_set([0])
    for _ in range(3):
        if some.included():
            hvd.allreduce(torch.ones(1), process_set=some)
            hvd.allgather(torch.ones(1), process_set=some)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size
        assert len(hvd.allgather(torch.ones(1))) == seat.size
    hvd.remove_process_set(some)


@check()
def arguments(seat: Seat) -> None:
    raises(UsageError, "different ranks", hvd.add_process_set, [0, 0])
    raises(UsageError, "different ranks", hvd.add_process_set, [seat.size])
    raises(UsageError, "different ranks", hvd.add_process_set, [-1])
    raises(UsageError, "integers", hvd.add_process_set, ["0"])
    raises(UsageError, "ranks", hvd.ProcessSet, 5)
    fresh = hvd.ProcessSet([0])
    assert fresh.process_set_id is None and fresh.size() is None and fresh.rank() is None
    raises(UsageError, "registered", hvd.allreduce, torch.ones(1), process_set=fresh)
    assert hvd.remove_process_set(fresh) is False
    assert hvd.ProcessSet(reversed(range(3))).ranks == [0, 1, 2]


@check(least=2)
def duplicates_and_order(seat: Seat) -> None:
    one = hvd.add_process_set(hvd.ProcessSet([seat.last]))
    raises(UsageError, "duplicate", hvd.add_process_set, [seat.last])
    raises(UsageError, "registered already", hvd.add_process_set, one)
    assert pickle.loads(pickle.dumps(one)).ranks == one.ranks
    hvd.remove_process_set(one)
    again = hvd.add_process_set([seat.last])
    assert again.ranks == [seat.last]
    hvd.remove_process_set(again)


@check(least=3)
def removed_while_an_operation_is_under_way(seat: Seat) -> None:
    """The removal raises on the rank with an operation in flight. When that is done, the removal succeeds on all
    ranks."""
    pair = hvd.add_process_set([0, seat.last])
    if seat.rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="unfinished", process_set=pair)
        raises(UsageError, "unfinished", hvd.remove_process_set, pair)
        assert pair.process_set_id is not None
        seat.meet("refused", ranks=[])
        assert hvd.synchronize(handle).item() == 2
    elif seat.rank == seat.last:
        seat.meet("refused", ranks=[0])
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="unfinished", process_set=pair).item() == 2
    assert hvd.remove_process_set(pair)
    assert hvd.allreduce(torch.ones(1)).item() == 1


@check(least=3)
def sets_that_come_and_go(seat: Seat) -> None:
    """Ranks take turns at being late: one has removed a set while another still looks for calls on it."""
    draws = random.Random(seat.rank)
    for number in range(40):
        pair = hvd.add_process_set([0, seat.last])
        if number % 2 and seat.rank in (0, seat.last):
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).tolist() == [2] * 3
        time.sleep(draws.random() / 500)
        assert hvd.remove_process_set(pair)


@check(least=3)
def sets_whose_removal_is_refused(seat: Seat) -> None:
    """The ranks ask to remove different sets. Both sets stay as they were, also for operations that repeat."""
    first, last = hvd.add_process_set([0, 1]), hvd.add_process_set([1, seat.last])

    def use_both() -> None:
        for process_set in (first, last):
            for _ in range(4 if process_set.included() else 0):
                assert hvd.allreduce(torch.ones(4), op=hvd.Sum, process_set=process_set).tolist() == [2] * 4

    use_both()
    raises(OperationMismatch, "", hvd.remove_process_set, first if seat.rank == 0 else last)
    use_both()
    assert hvd.remove_process_set(first) and hvd.remove_process_set(last)


@check(least=3)
def messages_on_a_set_that_is_removed(seat: Seat) -> None:
    """A message whose data is in flight arrives. A message without a receive ends with an error, and frees its
    buffer."""
    pair = hvd.add_process_set([0, seat.last])
    large, got = torch.arange(1 << 20, dtype=torch.float32), torch.zeros(1 << 20)
    handles = []
    if seat.rank == 0:
        handles = [hvd.send_async(large, seat.last, tag=1, process_set=pair)]
        for _ in range(17):  # more than are buffered
            handles.append(hvd.send_async(torch.ones(15000), seat.last, tag=2, process_set=pair))
    elif seat.rank == seat.last:
        handles = [hvd.recv_async(got, 0, tag=1, process_set=pair)]
        hvd.synchronize(handles.pop())
        assert torch.equal(got, large)
    assert hvd.remove_process_set(pair)
    for number, handle in enumerate(handles):
        try:
            hvd.synchronize(handle)
        except UsageError as error:
            assert number > 0 and "was removed before this call was over" in str(error)
    hvd.barrier()  # then the last rank has removed the set, too
    for _ in range(12):
        if seat.rank == 0:
            hvd.send(torch.ones(15000), seat.last)
    seat.meet("sent", ranks=[0])
    for _ in range(12):
        if seat.rank == seat.last:
            hvd.recv(torch.ones(15000), 0)
