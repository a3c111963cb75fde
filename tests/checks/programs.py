"""Random programs of collectives: every rank draws the same program from a seed, and computes the result of each call.

A program has calls of all kinds on random process sets: all dtypes and reductions, sizes around every internal limit,
names that repeat, other memory orders and shared memory. Several calls are in flight at once; each rank starts them and
waits for them in another order. Some ranks are late, all ranks must refuse some calls, and the program ends with joins.

python tests/checks/fuzz.py --minutes 60     # many programs, on random layouts of nodes
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import sordino.torch as hvd
from checks.mismatches import expect_mismatch
from checks.reference import DTYPES, FOLDS, assert_equal, assert_reduced, values
from checks.registry import Seat, check

STEPS = 30
KIB = 1024
# Limits in bytes: of one-shot operations (alone, or by the ranks of a node), of slots and chunks, of messages between
# nodes.
LIMITS = (0, 4, 4 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB)
FACTORS = (1.0, 1.0, 1.0, 2.0, 0.5)
MOST_SETS = 4


@dataclass
class Team:
    """A process set and its members, in order."""

    ranks: list[int]
    process_set: Any


class Program:
    """One program on one rank.

    Args:
        seat: the rank.
        seed: seed of the program; `draw` gives the same numbers on all ranks, `own` gives other numbers on each.
    """

    def __init__(self, seat: Seat, seed: int) -> None:
        self.seat = seat
        self.draw = random.Random(f"{seed} of {seat.size}")
        self.own = random.Random(f"{seed} of {seat.size} on {seat.rank}")
        self.teams = [Team(list(range(seat.size)), hvd.global_process_set)]
        self.step = 0

    def run(self, steps: int = STEPS) -> None:
        kinds: Sequence[Callable[[Team], Callable[[], None]]] = (
            self.reduce, self.reduce, self.reduce, self.group, self.at_once, self.broadcast, self.gather,
            self.reduce_scatter, self.exchange, self.meet, self.objects, self.disagree,
        )  # fmt: skip
        for self.step in range(steps):
            team = self.draw.choice(self.teams)
            late = self.draw.randrange(4 * self.seat.size)
            call = self.draw.choice(kinds)(team)
            if late == self.seat.rank:
                time.sleep(self.own.choice((0.0005, 0.005, 0.03)))
            if self.seat.rank in team.ranks:
                call()
            if self.draw.random() < 0.15:
                self.change_sets()
        self.join()

    # ---- arguments of calls ----------------------------------------------------------------------------------------

    def count(self, dtype: torch.dtype) -> int:
        """Return a number of elements near one of the limits, for one rank or for all of them."""
        size = max(1, self.draw.choice(LIMITS) // self.draw.choice((1, 1, self.seat.size)) // dtype.itemsize)
        return max(0, size + self.draw.choice((-1, 0, 0, 1)))

    def shape(self, dtype: torch.dtype) -> tuple[int, ...]:
        count = self.count(dtype)
        return self.draw.choice(((count,), (1, count), (count // 3, 3), (count // 8, 2, 4)))

    def inputs(
        self, team: Team, shape: tuple[int, ...], dtype: torch.dtype, number: int = 0
    ) -> dict[int, torch.Tensor]:
        """Return the contribution of each member, by rank."""
        return {rank: values(rank, shape, dtype, seed=1000 * self.step + number) for rank in team.ranks}

    def name(self) -> str | None:
        """Return one of few names, so that names repeat, also with other shapes and dtypes."""
        return self.draw.choice((None, f"name {self.draw.randrange(3)}"))

    def laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same values in memory of another kind or order, which differs between ranks."""
        how = self.own.randrange(4)
        if how == 0 and tensor.numel() and tensor.dtype != torch.bool:
            return hvd.shared_empty(tuple(tensor.shape), dtype=tensor.dtype).copy_(tensor)
        if how == 1 and tensor.dim() > 1:
            return tensor.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)
        if how == 2 and tensor.numel() > 1:
            wide = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 0] = tensor
            return wide[..., 0]
        return tensor.clone()

    # ---- kinds of calls: each draws the same on all ranks, and returns the members' function -------------------------

    def reduce(self, team: Team) -> Callable[[], None]:
        dtype, op = self.draw.choice(DTYPES), self.draw.choice(list(FOLDS.values()))
        inputs = self.inputs(team, self.shape(dtype), dtype)
        factors = {"prescale_factor": self.draw.choice(FACTORS), "postscale_factor": self.draw.choice(FACTORS)}
        name, turns, in_place = self.name(), self.draw.choice((1, 1, 3)), self.draw.random() < 0.5

        def call() -> None:
            for _ in range(turns):
                mine = self.laid_out(inputs[self.seat.rank])
                reduce = hvd.allreduce_ if in_place else hvd.allreduce
                result = reduce(mine, name=name, op=op, process_set=team.process_set, **factors)
                assert (result is mine) == in_place
                pre, post = factors.values()
                assert_reduced(result.contiguous(), op, list(inputs.values()), pre, post)

        return call

    def group(self, team: Team) -> Callable[[], None]:
        op, parts = self.draw.choice(list(FOLDS.values())), []
        for number in range(self.draw.randint(1, 5)):
            dtype = self.draw.choice(DTYPES)
            parts.append(self.inputs(team, self.shape(dtype), dtype, number))
        name = self.name()

        def call() -> None:
            mine = [self.laid_out(part[self.seat.rank]) for part in parts]
            for result, part in zip(
                hvd.grouped_allreduce_(mine, name=name, op=op, process_set=team.process_set), parts
            ):
                assert_reduced(result.contiguous(), op, list(part.values()))

        return call

    def at_once(self, team: Team) -> Callable[[], None]:
        parts = []
        for number in range(self.draw.randint(2, 8)):
            dtype, op = self.draw.choice(DTYPES), self.draw.choice(list(FOLDS.values()))
            parts.append((f"{number} at once", op, self.inputs(team, self.shape(dtype), dtype, number)))

        def call() -> None:
            started = {}
            for name, op, part in self.own.sample(parts, len(parts)):
                mine = self.laid_out(part[self.seat.rank])
                started[name] = hvd.allreduce_async_(mine, name=name, op=op, process_set=team.process_set)
            for name, op, part in self.own.sample(parts, len(parts)):
                assert_reduced(hvd.synchronize(started[name]).contiguous(), op, list(part.values()))

        return call

    def broadcast(self, team: Team) -> Callable[[], None]:
        dtype, root = self.draw.choice(DTYPES), self.draw.choice(team.ranks)
        inputs, in_place, name = self.inputs(team, self.shape(dtype), dtype), self.draw.random() < 0.5, self.name()

        def call() -> None:
            mine = self.laid_out(inputs[self.seat.rank])
            result = (hvd.broadcast_ if in_place else hvd.broadcast)(
                mine, root, name=name, process_set=team.process_set
            )
            assert_equal(result.contiguous(), inputs[root])

        return call

    def gather(self, team: Team) -> Callable[[], None]:
        dtype, width = self.draw.choice(DTYPES), self.draw.randint(1, 5)
        most = self.count(dtype) // width // len(team.ranks)
        rows = {rank: self.draw.choice((0, 1, most, self.draw.randint(0, most))) for rank in team.ranks}
        inputs = {rank: values(rank, (rows[rank], width), dtype, seed=self.step) for rank in team.ranks}
        name = self.name()

        def call() -> None:
            result = hvd.allgather(self.laid_out(inputs[self.seat.rank]), name=name, process_set=team.process_set)
            assert_equal(result, torch.cat(list(inputs.values())))

        return call

    def reduce_scatter(self, team: Team) -> Callable[[], None]:
        dtype, op = self.draw.choice(DTYPES), self.draw.choice((hvd.Sum, hvd.Average, hvd.Min, hvd.Max))
        width = self.draw.randint(1, 4)
        rows = self.count(dtype) // width
        inputs, name = self.inputs(team, (rows, width), dtype), self.name()

        def call() -> None:
            place, size = team.ranks.index(self.seat.rank), len(team.ranks)
            begin = place * (rows // size) + min(place, rows % size)
            part = slice(begin, begin + rows // size + (place < rows % size))
            result = hvd.reducescatter(
                self.laid_out(inputs[self.seat.rank]), name=name, op=op, process_set=team.process_set
            )
            assert_reduced(result, op, [one[part] for one in inputs.values()])

        return call

    def exchange(self, team: Team) -> Callable[[], None]:
        dtype, width = self.draw.choice(DTYPES), self.draw.randint(1, 3)
        most = self.count(dtype) // width // len(team.ranks) ** 2
        splits = [[self.draw.choice((0, 1, most)) for _ in team.ranks] for _ in team.ranks]
        name = self.name()

        def call() -> None:
            parts = {
                rank: values(rank, (sum(row), width), dtype, seed=self.step).split(row)
                for rank, row in zip(team.ranks, splits)
            }
            place = team.ranks.index(self.seat.rank)
            mine = self.laid_out(torch.cat(parts[self.seat.rank]))
            own_splits = torch.tensor(splits[place], dtype=torch.int32)
            result, received = hvd.alltoall(mine, own_splits, name=name, process_set=team.process_set)
            assert_equal(result, torch.cat([parts[rank][place] for rank in team.ranks]))
            assert received.tolist() == [row[place] for row in splits]

        return call

    def meet(self, team: Team) -> Callable[[], None]:
        return lambda: hvd.barrier(process_set=team.process_set)

    def objects(self, team: Team) -> Callable[[], None]:
        things = {rank: {"rank": rank, "text": "x" * self.draw.randrange(3000)} for rank in team.ranks}
        return lambda: _equal(hvd.allgather_object(things[self.seat.rank], process_set=team.process_set), things)

    def disagree(self, team: Team) -> Callable[[], None]:
        """The last member gives another shape: all members raise and continue."""
        count, name = self.draw.choice((3, 20_000)), self.name()

        def call() -> None:
            mine = torch.ones(count + (self.seat.rank == team.ranks[-1]))
            if len(team.ranks) > 1:
                expect_mismatch(lambda: hvd.allreduce(mine, name=name, process_set=team.process_set), ("shape",))

        return call

    # ---- process sets and joins ------------------------------------------------------------------------------------

    def change_sets(self) -> None:
        """Add a set of random ranks or, if there are enough sets, remove one. Collective."""
        if len(self.teams) > MOST_SETS:
            gone = self.teams.pop(self.draw.randrange(1, len(self.teams)))
            assert hvd.remove_process_set(gone.process_set)
            return
        ranks = sorted(self.draw.sample(range(self.seat.size), self.draw.randint(1, self.seat.size)))
        if all(ranks != team.ranks for team in self.teams):
            self.teams.append(Team(ranks, hvd.add_process_set(ranks)))

    def join(self) -> None:
        """Call as many all-reduces as were drawn for this rank, then contribute zeros until all ranks have joined."""
        turns = [self.draw.randint(0, 3) for _ in range(self.seat.size)]
        for turn in range(turns[self.seat.rank]):
            real = [values(rank, 500, torch.float64, seed=turn) for rank in range(self.seat.size)]
            inputs = [one if turns[rank] > turn else torch.zeros_like(one) for rank, one in enumerate(real)]
            assert_reduced(hvd.allreduce(real[self.seat.rank], op=hvd.Sum, name=f"joining {turn}"), hvd.Sum, inputs)
        self.seat.same("joined last", hvd.join())
        for team in self.teams[1:]:
            assert hvd.remove_process_set(team.process_set)


def _equal(gathered: list[Any], things: dict[int, Any]) -> None:
    assert gathered == list(things.values())


@check(seed=range(24))
def random_program(seat: Seat, seed: int) -> None:
    Program(seat, seed).run()
