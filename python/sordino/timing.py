"""Fair timing on a shared machine: contestants take turns, ranks start together, and the slowest rank counts."""

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
    """Ranks that are timed together. They communicate through mpi4py if `communicator` is set, else through Sordino.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        communicator: an mpi4py communicator for this object alone, or None.
        one_node: whether all ranks run on one machine.
    """

    rank: int = 0
    size: int = 1
    communicator: Any = None
    one_node: bool = True

    def barrier(self) -> None:
        """Wait until all ranks have called this. Collective."""
        if self.communicator is not None:
            # MPI's blocking barrier spins. That costs whole time slices of a contestant whose helper threads still need
            # the core, as Gloo's do.
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
    """Return seconds of wall time, of CPU time of this process, and of CPU time of the whole machine.

    The last one is 0 if the system does not report it.
    """
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return time.perf_counter(), time.process_time(), 0.0
    busy = sum(fields) - fields[3] - fields[4]  # all but idle and waiting for disks
    return time.perf_counter(), time.process_time(), busy / os.sysconf("SC_CLK_TCK")


class Watch:
    """Measures the CPU use of other processes since construction. Construction and `others` are collective."""

    def __init__(self, participants: Participants) -> None:
        self._participants = participants
        self._begin = _clocks()

    def others(self) -> float | None:
        """Return the average number of cores that processes other than the ranks used. Collective.

        None if it is unknown, or if the ranks are on several machines.
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
    """Measurements of one contestant: for each round the seconds of each run on its slowest rank."""

    rounds: list[Seconds] = field(default_factory=list)

    @property
    def seconds(self) -> Seconds:
        return np.concatenate(self.rounds)

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def round_medians(self) -> Seconds:
        """Median of each round, to be compared with another contestant's in the same round."""
        return np.array([np.median(one) for one in self.rounds])

    def summary(self) -> dict[str, float]:
        """Return the values of `summarize`, for the JSON file."""
        return summarize(self.seconds)


def summarize(values: Seconds) -> dict[str, float]:
    """Return median, quartiles, minimum and number of measurements."""
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
    """Return the order of contestants in round `number`: each round begins with the next contestant."""
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

    In every round each contestant gets one turn of equal length (several runs if they are short), so a slow period of
    the machine affects all equally. Each round has another order, so no contestant always follows the same one.

    Args:
        contestants: functions to run, by name.
        participants: the ranks that run them.
        budget: approximate total in seconds. It limits the length of the turns, then the number of rounds.
        rounds: number of rounds that the budget is spread over.
        warmup: runs of each contestant before the first round.
        least_rounds: number of rounds that run even if the budget is spent.
        turns: for some contestants, a function that returns a context manager to enter for each turn, for things that
            must not exist while others run. Such a turn has its own warm-up.
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
