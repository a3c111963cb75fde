"""Timing that is fair on a shared machine: contestants take turns, ranks start together, the slowest one counts."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Run = Callable[[], object]
Turn = Callable[[], AbstractContextManager[object]]

_MOST_IN_A_TURN = 50


@dataclass
class Participants:
    """The ranks that are timed together. It talks through mpi4py where that is loaded, else through Sordino.

    Attributes:
        communicator: an mpi4py communicator of its own, or None.
        one_node: whether they all run on one machine.
    """

    rank: int = 0
    size: int = 1
    communicator: Any = None
    one_node: bool = True

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        if self.communicator is not None:
            # MPI's own barrier spins. Where a contestant's helper threads still need the core (Gloo's do), that costs
            # it whole time slices.
            request = self.communicator.Ibarrier()
            while not request.Test():
                os.sched_yield()
        elif self.size > 1:
            import sordino.torch as hvd

            hvd.barrier()

    def maximum(self, values: Seconds) -> Seconds:
        """Return the element-wise maximum over the ranks. Collective."""
        if self.size == 1:
            return values
        if self.communicator is not None:
            from mpi4py import MPI

            result = np.empty_like(values)
            self.communicator.Allreduce(values, result, op=MPI.MAX)
            return result
        import torch

        import sordino.torch as hvd

        reduced: Seconds = hvd.allreduce(torch.from_numpy(values), op=hvd.Max, name="bench.maximum").numpy()
        return reduced


def _clocks() -> tuple[float, float, float]:
    """Return seconds of wall time, of this process's CPU time, and of CPU time of the whole machine.

    The last one is 0 if it is not told.
    """
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return time.perf_counter(), time.process_time(), 0.0
    busy = sum(fields) - fields[3] - fields[4]  # all but idle and waiting for disks
    return time.perf_counter(), time.process_time(), busy / os.sysconf("SC_CLK_TCK")


class Watch:
    """Tells how busy other processes kept this machine since it was made. All ranks make it and ask it together."""

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._begin = _clocks()

    def others(self) -> float | None:
        """Return the cores that processes other than the ranks used on average. Collective.

        None where that cannot be told.
        """
        wall, own, busy = (now - then for now, then in zip(_clocks(), self._begin, strict=True))
        shares = np.zeros(self._participants.size)
        shares[self._participants.rank] = own
        ours = float(self._participants.maximum(shares).sum())
        if busy == 0 or not self._participants.one_node:
            return None
        return round(max(0.0, busy - ours) / wall, 2)


@dataclass
class Samples:
    """What was measured of one contestant: for each round the seconds of each run, of the slowest rank."""

    rounds: list[Seconds] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        return np.concatenate(self.rounds)

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def round_medians(self) -> Seconds:
        """One number a round, to be compared with another contestant's of the same round."""
        return np.array([np.median(one) for one in self.rounds])

    def summary(self) -> dict[str, float]:
        """Return median and quartiles, for the JSON file."""
        return summarize(self.seconds)


def summarize(values: Seconds) -> dict[str, float]:
    """Return median, quartiles, least value and number of some measurements."""
    low, median, high = (float(value) for value in np.percentile(values, [25, 50, 75]))
    return {"median": median, "q1": low, "q3": high, "least": float(values.min()), "count": int(values.size)}


def time_block(run: Run, participants: Participants, count: int) -> Seconds:
    """Return the local seconds of each of `count` runs, each after a barrier."""
    seconds = np.empty(count)
    clock = time.perf_counter
    for index in range(count):
        participants.barrier()
        begin = clock()
        run()
        seconds[index] = clock() - begin
    return seconds


def rotated(names: Iterable[str], number: int) -> list[str]:
    """Return the order of a round in which contestants take turns: each round begins with the next one."""
    found = list(names)
    first = number % len(found)
    return found[first:] + found[:first]


def race(
    contestants: Mapping[str, Run],
    participants: Participants,
    budget: float,
    rounds: int = 20,
    warmup: int = 3,
    least_rounds: int = 5,
    turns: Mapping[str, Turn] | None = None,
) -> dict[str, Samples]:
    """Time contestants against each other. Collective; all ranks pass the same names in the same order.

    In every round each contestant gets one turn of equal length (several runs if they are short), so a slow spell of
    the machine hits all alike; each round has another order, so none always comes after the same neighbour.

    Args:
        contestants: what to run, by name.
        participants: the ranks that run them.
        budget: seconds to spend, about. It shortens the turns, then the number of rounds.
        rounds: how many rounds to spread the budget over.
        warmup: runs of each contestant before the first round.
        least_rounds: rounds that are run even when the budget is spent.
        turns: makes what surrounds each turn of a contestant that must not be about while others run. Such a turn has
            a warm-up of its own.
    """

    def take_turn(name: str, count: int) -> Seconds:
        surroundings = (turns or {}).get(name)
        with surroundings() if surroundings else nullcontext():
            if surroundings:
                time_block(contestants[name], participants, warmup)
            return participants.maximum(time_block(contestants[name], participants, count))

    names = list(contestants)
    share = budget / rounds / len(names)
    counts = {}
    for name in names:
        estimate = max(float(np.median(take_turn(name, warmup))), 1e-9)
        counts[name] = int(np.clip(share / estimate, 1, _MOST_IN_A_TURN))
    samples = {name: Samples() for name in names}
    begin = time.perf_counter()
    for number in range(rounds):
        for name in random.Random(number).sample(names, len(names)):  # the same on all ranks
            samples[name].rounds.append(take_turn(name, counts[name]))
        elapsed = float(participants.maximum(np.array([time.perf_counter() - begin]))[0])
        if number + 1 >= least_rounds and elapsed > budget:
            break
    return samples
