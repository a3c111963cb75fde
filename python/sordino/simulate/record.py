"""Record of a simulation: one array per counter, cheap for 10^5 workers, and the learning curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from sordino.simulate.links import Floats, Ranks

Rows = int | slice | Ranks
"""Rows of an array, as an index."""

Activity = Literal["compute", "wait", "transfer"]


def rows_of(workers: list[int]) -> Rows:
    """Return the rows of some workers as an index. A single worker is cheaper as a number."""
    return workers[0] if len(workers) == 1 else np.array(workers, np.int64)


BY_PAIRS = 64
"""Largest number of workers for which bytes are counted by pairs. The course has only this many workers."""


class Sums(NamedTuple):
    """Counters of the first workers, up to `BY_PAIRS`, at one time.

    Same arrays as in `Record`, [workers]; `pairs`: [workers, workers].
    """

    time: float
    steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    computing: Floats
    waiting: Floats
    bytes: Floats
    pairs: Floats | None
    pulls: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ages: Floats


class Span(NamedTuple):
    """Activity of a worker from `begin` to `end`, in virtual seconds.

    "transfer" is the receipt of a model from `peer`, which may overlap "compute". `peer` is -1 if there is no peer.
    """

    worker: int
    activity: Activity
    begin: float
    end: float
    peer: int


class Record:
    """Record of one run.

    Args:
        spans_until: virtual seconds up to which spans are kept. 0 keeps no spans.

    Attributes:
        steps: optimizer steps by worker; int64 [workers], as are `messages` and `pulls`.
        computing: seconds by worker; float64 [workers], as are `waiting`, `bytes` and `ages`.
        waiting: seconds in which the worker was idle.
        messages: messages that the worker sent: models, parts of models, and scheduling messages.
        bytes: bytes of these messages.
        pairs: the bytes by worker and receiver, float64 [workers, workers]; None for more than `BY_PAIRS` workers.
        pulls: models of other workers, or parts of them, that the worker has averaged into its own.
        ages: sum over `pulls` of the seconds between the copying of the other's parameters and their use.
        oldest: the longest of these times, over all workers.
        course: the counters at every point of the learning curve.
        curve: {"time": virtual seconds, and the values of `Problem.evaluate`}, in the order of time.
        spans: see `Span`.
        warnings: warnings that a user of the real algorithm would have seen.
    """

    def __init__(self, workers: int, spans_until: float = 0.0) -> None:
        self.steps = np.zeros(workers, np.int64)
        self.computing = np.zeros(workers)
        self.waiting = np.zeros(workers)
        self.messages = np.zeros(workers, np.int64)
        self.bytes = np.zeros(workers)
        self.pairs = np.zeros((workers, workers)) if workers <= BY_PAIRS else None
        self.pulls = np.zeros(workers, np.int64)
        self.ages = np.zeros(workers)
        self.oldest = 0.0
        self.curve: list[dict[str, float]] = []
        self.course: list[Sums] = []
        self.spans: list[Span] = []
        self.warnings: list[str] = []
        self._spans_until = spans_until

    def computed(self, rows: Rows, begin: float | Floats, end: float | Floats) -> None:
        """Note a step of each of these workers."""
        self.steps[rows] += 1
        self.computing[rows] += end - begin
        if self._spans_until > 0 and np.any(begin < self._spans_until):
            workers = np.arange(len(self.steps))[rows]
            for worker, since, until in np.nditer([workers, begin, end]):
                self._span(int(worker), "compute", float(since), float(until), -1)

    def waited(self, worker: int, begin: float, end: float, peer: int = -1) -> None:
        """Note that a worker had to wait (for `peer`)."""
        self.waiting[worker] += end - begin
        self._span(worker, "wait", begin, end, peer)

    def sent(self, worker: int, to: int, count: float) -> None:
        """Note that a worker has sent a message of `count` bytes to another one."""
        self.messages[worker] += 1
        self.bytes[worker] += count
        if self.pairs is not None:
            self.pairs[worker, to] += count

    def sent_all(self, sources: Ranks, targets: Ranks, counts: Floats, rounds: int = 1) -> None:
        """Note `rounds` messages from each of `sources` to the same place of `targets`, with `counts` bytes each."""
        workers = len(self.bytes)
        self.messages += rounds * np.bincount(sources, minlength=workers)
        self.bytes += rounds * np.bincount(sources, weights=counts, minlength=workers)
        if self.pairs is not None:
            np.add.at(self.pairs, (sources, targets), rounds * counts)

    def received(self, worker: int, peer: int, begin: float, end: float) -> None:
        """Note that a worker has received a model from `begin` to `end`."""
        self._span(worker, "transfer", begin, end, peer)

    def used(self, worker: int, age: float) -> None:
        """Note that a worker has averaged a model that was copied `age` seconds ago into its own."""
        self.pulls[worker] += 1
        self.ages[worker] += age
        self.oldest = max(self.oldest, age)

    def evaluated(self, time: float, found: Mapping[str, float]) -> None:
        """Note a point of the learning curve."""
        self.curve.append({"time": time, **found})
        self.course.append(self.sums(time))

    def sums(self, time: float) -> Sums:
        """Return the current counters. `time` is the current time."""
        first = slice(BY_PAIRS)
        pairs = None if self.pairs is None else self.pairs.copy()
        return Sums(
            time=time,
            steps=self.steps[first].copy(),
            computing=self.computing[first].copy(),
            waiting=self.waiting[first].copy(),
            bytes=self.bytes[first].copy(),
            pairs=pairs,
            pulls=self.pulls[first].copy(),
            ages=self.ages[first].copy(),
        )

    def warned(self, text: str) -> None:
        """Note a warning. Each text is kept once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def _span(self, worker: int, activity: Activity, begin: float, end: float, peer: int) -> None:
        if begin < self._spans_until and end > begin:
            self.spans.append(Span(worker, activity, begin, end, peer))

    def as_dict(self, by_worker: bool) -> dict[str, Any]:
        """Return means over workers (`age`: over all pulls) and the curve, for a JSON file.

        With `by_worker`, also return the values of every worker.
        """
        pulls = int(self.pulls.sum())
        found: dict[str, Any] = {
            "steps": float(self.steps.mean()),
            "computing": float(self.computing.mean()),
            "waiting": float(self.waiting.mean()),
            "messages": float(self.messages.mean()),
            "bytes": float(self.bytes.mean()),
            "pulls": float(self.pulls.mean()),
            "age": float(self.ages.sum()) / pulls if pulls else None,
            "oldest": self.oldest,
            "warnings": self.warnings,
            "curve": self.curve,
        }
        if by_worker:
            names = ("steps", "computing", "waiting", "messages", "bytes", "pulls", "ages")
            found["workers"] = {name: getattr(self, name).tolist() for name in names}
        return found
