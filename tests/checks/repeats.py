"""Operations of all kinds that repeat: ranks agree on them in turns, without negotiations (collectives/repeat.h)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.reference import assert_equal
from checks.registry import Seat, check
from checks.repeated import in_one_shot
from sordino.errors import UsageError
from sordino.runtime.context import current

REPEATS = 4
UNTIL_UNDISTURBED = 20  # an operation is submitted if the world's own thread polls at this moment
KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast", "barrier")
# Rows of a rank, of two float32 each: in a cache line, in a slot, and too large for one shot.
ROWS = (1, 600, 20_000)


class Program:
    """Operations of a rank, with inputs and results that all ranks know: small whole numbers, whose sums are exact."""

    def __init__(self, seat: Seat) -> None:
        self.ranks, self.rank = seat.size, seat.rank

    def tensor(self, rank: int, rows: int, turn: int) -> torch.Tensor:
        return (torch.arange(2 * rows, dtype=torch.float32) % 7 + rank + 3 * turn).view(rows, 2)

    def rows_of(self, kind: str, rank: int, rows: int) -> int:
        """Return the rows of a rank's input: uneven for allgather, divisible for alltoall."""
        return rows + rank if kind == "allgather" else rows * self.ranks if kind == "alltoall" else rows

    def inputs(self, kind: str, rows: int, turn: int) -> list[torch.Tensor]:
        return [self.tensor(rank, self.rows_of(kind, rank, rows), turn) for rank in range(self.ranks)]

    def expected(self, kind: str, inputs: list[torch.Tensor]) -> torch.Tensor | None:
        if kind == "allreduce":
            return torch.stack(inputs).sum(0)
        if kind == "allgather":
            return torch.cat(inputs)
        if kind == "broadcast":
            return inputs[self.ranks - 1]
        if kind == "alltoall":
            return torch.cat([one.chunk(self.ranks)[self.rank] for one in inputs])
        if kind == "reducescatter":
            rows, rest = divmod(len(inputs[0]), self.ranks)
            begin = self.rank * rows + min(self.rank, rest)
            return torch.stack(inputs).sum(0)[begin : begin + rows + (self.rank < rest)]
        return None

    def call(self, kind: str, mine: torch.Tensor, name: str | None, **options: Any) -> Any:
        if kind == "barrier":
            return hvd.barrier()
        if kind == "broadcast":
            return hvd.broadcast(mine, self.ranks - 1, name=name)
        if kind in ("allreduce", "reducescatter"):
            options["op"] = hvd.Sum
        function: Callable[..., Any] = getattr(hvd, kind)
        return function(mine, name=name, **options)

    def start(self, kind: str, mine: torch.Tensor, name: str | None) -> Callable[[], Any]:
        """Start an asynchronous call. Return a function that waits for its result."""
        if kind == "barrier":  # it has only a blocking form
            return hvd.barrier
        if kind == "broadcast":
            handle = hvd.broadcast_async(mine, self.ranks - 1, name=name)
        elif kind in ("allreduce", "reducescatter"):
            handle = getattr(hvd, f"{kind}_async")(mine, name=name, op=hvd.Sum)
        else:
            handle = getattr(hvd, f"{kind}_async")(mine, name=name)
        return lambda: hvd.synchronize(handle)[0] if kind == "alltoall" else hvd.synchronize(handle)


@check(kind=KINDS, way=("blocking", "asynchronous", "out"), named=(True, False))
def every_kind_and_size(seat: Seat, kind: str, way: str, named: bool) -> None:
    """Results are right in every repeat, and small operations of a node are done in one shot."""
    program = Program(seat)
    if way == "out" and kind not in ("allgather", "reducescatter", "alltoall"):
        return
    before = in_one_shot()
    for rows in ROWS:
        name = f"{kind}.{rows}" if named else None
        out: torch.Tensor | None = None
        for turn in range(REPEATS):
            inputs = program.inputs(kind, rows, turn)
            mine, expected = inputs[seat.rank].clone(), program.expected(kind, inputs)
            if way == "asynchronous":
                result = program.start(kind, mine, name)()
            elif way == "out":
                assert expected is not None
                out = torch.empty_like(expected) if out is None else out
                version = out._version
                result = program.call(kind, mine, name, out=out)
                assert result is out and out._version > version
            else:
                result = program.call(kind, mine, name)
            if expected is not None:
                assert_equal(result, expected)
            assert_equal(mine, inputs[seat.rank])
    world = current().world
    one_node = len(set(world.nodes)) == 1 and world.shares_memory and current().host_device is None
    if one_node and seat.size > 1 and not world.survives_losses:
        for turn in range(100):  # until no rank was late in some repeat
            if in_one_shot() > before:
                break
            program.call(kind, torch.full((seat.size, 2), float(turn)), "until")
        assert in_one_shot() > before


@check()
def results_may_lie_where_the_inputs_are(seat: Seat) -> None:
    """The input may be this rank's part of the result (allgather), or the result this rank's part of the input."""
    for rows in (2, 30_000):
        for turn in range(REPEATS):
            whole = torch.full((rows * seat.size, 2), -1.0)
            mine = whole[seat.rank * rows : (seat.rank + 1) * rows]
            mine.fill_(float(seat.rank + turn))
            hvd.allgather(mine, name=f"whole.{rows}", out=whole)
            expected = torch.cat([torch.full((rows, 2), float(rank + turn)) for rank in range(seat.size)])
            assert_equal(whole, expected)
            hvd.reducescatter(whole, name=f"part.{rows}", op=hvd.Sum, out=mine)
            assert_equal(mine, torch.full((rows, 2), float((seat.rank + turn) * seat.size)))


@check(least=2, way=("blocking", "asynchronous", "out"))
def rows_that_change(seat: Seat, way: str) -> None:
    """If one rank sends more or less than before, all ranks notice it, and a result of the wrong size is refused."""
    for rows in (3, 20_000):
        outs: dict[int, torch.Tensor] = {}
        for turn in range(3 * REPEATS):
            more = rows + (turn // REPEATS) * (seat.rank == seat.last)
            sizes = [rows + (turn // REPEATS) * (rank == seat.last) for rank in range(seat.size)]
            mine = torch.full((more, 2), float(seat.rank + turn))
            expected = torch.cat([torch.full((size, 2), float(rank + turn)) for rank, size in enumerate(sizes)])
            if way == "asynchronous":
                result = hvd.synchronize(hvd.allgather_async(mine, name=f"rows.{rows}"))
            elif way == "out" and turn % REPEATS:
                result = hvd.allgather(mine, name=f"rows.{rows}", out=outs[sum(sizes)])
            elif way == "out" and turn:
                stale = outs[sum(sizes) - 1]
                raises(UsageError, "out= has shape", hvd.allgather, mine, name=f"rows.{rows}", out=stale)
                result = outs[sum(sizes)] = expected.clone()
            else:
                result = hvd.allgather(mine, name=f"rows.{rows}")
                outs[sum(sizes)] = torch.empty_like(expected)
            assert_equal(result, expected)


@check(least=2)
def rows_without_bytes(seat: Seat) -> None:
    """A result without bytes has the right shape, also after its shape has changed."""
    for turn in range(3 * REPEATS):
        sizes = [3 + 2 * (turn // REPEATS) * (rank == seat.last) for rank in range(seat.size)]
        mine = torch.empty(sizes[seat.rank], 0)
        assert hvd.allgather(mine, name="no bytes").shape == (sum(sizes), 0)
        assert hvd.synchronize(hvd.allgather_async(mine, name="no bytes either")).shape == (sum(sizes), 0)


@check(least=2, seed=range(4))
def programs_of_random_operations(seat: Seat, seed: int) -> None:
    """All ranks call the same operations in the same order. Each draws whether it blocks, and whether it is late."""
    program = Program(seat)
    common, own = random.Random(seed), random.Random(1000 * seed + seat.rank)
    for turn in range(60):
        kind, rows = common.choice(KINDS), common.choice(ROWS)
        second, more = common.choice(KINDS[:-1]), common.choice(ROWS)
        named = common.random() < 0.7
        inputs, others = program.inputs(kind, rows, turn), program.inputs(second, more, turn)
        mine, other = inputs[seat.rank], others[seat.rank]
        name, another = (f"{kind}.{rows}", f"second.{second}.{more}") if named else (None, f"second.{second}.{more}")
        if own.random() < 0.05:
            time.sleep(0.02)
        if own.random() < 0.4:
            finish = program.start(second, other, another)
            result = program.call(kind, mine, name)
            received = finish()
        elif kind != "barrier" and own.random() < 0.5:
            finish = program.start(kind, mine, name)
            received = program.call(second, other, another)
            result = finish()
        else:
            result = program.call(kind, mine, name)
            received = program.start(second, other, another)()
        if (expected := program.expected(kind, inputs)) is not None:
            assert_equal(result, expected)
        assert_equal(received, program.expected(second, others))


@check(least=2)
def tensors_for_results_that_do_not_fit(seat: Seat) -> None:
    """Such tensors are refused after the operation, in its first call and in its repeats."""
    for rows in (2, 20_000):
        mine = torch.full((rows * seat.size, 2), float(seat.rank))
        for _ in range(REPEATS):
            gathered = hvd.allgather(mine, name=f"g{rows}")
            raises(UsageError, "out= has shape", hvd.allgather, mine, name=f"g{rows}", out=mine)
            raises(UsageError, "out= has shape", hvd.reducescatter, mine, name=f"r{rows}", out=mine)
            raises(UsageError, "dtype", hvd.allgather, mine, name=f"g{rows}", out=gathered.double())
            leaf = torch.zeros_like(gathered, requires_grad=True)
            raises(UsageError, "not differentiable", hvd.allgather, mine, name=f"g{rows}", out=leaf)
            assert not leaf.any()
            assert_equal(gathered, torch.cat([torch.full_like(mine, float(rank)) for rank in range(seat.size)]))


@check()
def empty_tensors_in_place(seat: Seat) -> None:
    """Empty tensors have no address, but the result is the caller's tensor in every repeat."""
    mine = torch.empty(0, 3)
    for _ in range(REPEATS):
        assert hvd.broadcast_(mine, 0, name="b") is mine
        assert hvd.synchronize(hvd.broadcast_async_(mine, 0, name="b")) is mine
        assert hvd.allreduce_(mine, name="a") is mine
        assert hvd.synchronize(hvd.allreduce_async_(mine, name="a")) is mine


@check(least=2)
def all_to_all_into_its_input(seat: Seat) -> None:
    for rows in (2, 20_000):
        for turn in range(REPEATS):
            parts = [torch.full((rows, 2), float(seat.rank * 100 + to + turn)) for to in range(seat.size)]
            mine = torch.cat(parts)
            assert hvd.alltoall(mine, name=f"t{rows}", out=mine) is mine
            sent = [torch.full((rows, 2), float(rank * 100 + seat.rank + turn)) for rank in range(seat.size)]
            assert_equal(mine, torch.cat(sent))


@check(least=2)
def unnamed_ones_in_flight_whose_rows_change(seat: Seat) -> None:
    """The second operation is started when this rank knows the sizes of an earlier one, and the first changes them."""
    for turn in range(6 * REPEATS):
        more = 5 if turn % 3 else 3
        handles, expected = [], []
        for part in range(2):
            rows = [more if rank == seat.last else 3 for rank in range(seat.size)]
            tensors = [torch.full((count, 2), float(rank + turn + part)) for rank, count in enumerate(rows)]
            handles.append(hvd.allgather_async(tensors[seat.rank]))
            expected.append(torch.cat(tensors))
        for handle, whole in zip(handles, expected):
            assert_equal(hvd.synchronize(handle), whole)


@check(least=2)
def names_that_look_unnamed(seat: Seat) -> None:
    names = ["noname.a", "noname.b", "x.noname."]
    for turn in range(REPEATS):
        order = names if seat.rank % 2 else names[::-1]
        handles = {name: hvd.allreduce_async(torch.full((3,), float(turn + len(name))), name=name) for name in order}
        for name, handle in handles.items():
            assert_equal(hvd.synchronize(handle), torch.full((3,), float(turn + len(name))))


@check(kind=KINDS[:-1])
def sets_of_one_rank(seat: Seat, kind: str) -> None:
    """A rank that is alone does each operation at once, in any way and size, also the first one of a name."""
    sets = [hvd.add_process_set([rank]) for rank in range(seat.size)] if seat.size > 1 else [hvd.global_process_set]
    own: dict[str, Any] = {"process_set": sets[seat.rank]}
    if kind in ("allreduce", "reducescatter"):
        own["op"] = hvd.Average
    roots = (seat.rank,) if kind == "broadcast" else ()
    blocking, begin = getattr(hvd, kind), getattr(hvd, f"{kind}_async")
    at_once = current().host_device is None and not current().survives_losses
    for rows in (1, 600, 20_000):
        for turn in range(REPEATS):
            mine = torch.arange(2 * rows, dtype=torch.float32).view(rows, 2) + turn
            for which in ("new", "known", "unnamed"):
                for attempt in range(UNTIL_UNDISTURBED):
                    names = {"new": f"{kind}.{rows}.{turn}.{attempt}", "known": f"{kind}.{rows}", "unnamed": None}
                    name, before = names[which], in_one_shot()
                    result = blocking(mine, *roots, name=name, **own)
                    handle = begin(mine, *roots, name=name, **own)
                    done = in_one_shot() - before
                    if name is not None:
                        told = "has been started, but not waited for"
                        raises(UsageError, told, blocking, mine, *roots, name=name, **own)
                    received = hvd.synchronize(handle)
                    if kind == "alltoall":
                        received, splits = received
                        assert_equal(splits, torch.tensor([rows], dtype=torch.int32))
                        splits.fill_(-1)  # does not change the next one
                    assert_equal(result, mine)
                    assert_equal(received, mine)
                    assert result.data_ptr() != mine.data_ptr() and received.data_ptr() != mine.data_ptr()
                    if done == 2 * at_once:
                        break
                assert done == 2 * at_once, (which, rows, turn, done)
    factors = {"prescale_factor": 2.0, "postscale_factor": 3.0}
    scaled = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="scaled", process_set=sets[seat.rank], **factors)
    assert_equal(scaled, torch.full((3,), 6.0))
    hvd.barrier(process_set=sets[seat.rank])


@check()
def first_calls_that_are_refused(seat: Seat) -> None:
    """Arguments that a rank can refuse by itself raise the same errors for every set."""
    sets = [hvd.add_process_set([rank]) for rank in range(seat.size)] if seat.size > 1 else []
    for own in (hvd.global_process_set, *sets[seat.rank : seat.rank + 1]):
        mine = torch.ones(own.size() * 2 or 2)
        set_ = {"process_set": own}
        raises(UsageError, "invalid root rank", hvd.broadcast, mine, seat.size, name="a", **set_)
        raises(UsageError, "scalar inputs", hvd.reducescatter, torch.tensor(1.0), name="b", **set_)
        raises(UsageError, "must be a finite number", hvd.allreduce, mine, prescale_factor=float("nan"), **set_)
        raises(UsageError, "floating-point", hvd.allreduce, mine.int(), op=hvd.Adasum, name="c", **set_)
        if own.size() > 1:
            raises(UsageError, "not an even multiple", hvd.alltoall, mine[1:], name="d", **set_)
        assert_equal(hvd.allgather(torch.tensor(2.0), name="e", **set_), torch.full((own.size(),), 2.0))
    for place, other in enumerate(sets):
        if place != seat.rank:
            raises(UsageError, "of the provided process set", hvd.allreduce, torch.ones(2), name="f", process_set=other)
