"""What happens to the workers: sums in one array a quantity, cheap for 10^5 workers, and the learning curve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from sordino.simulate.links import Floats, Ranks

Rows = int | slice | Ranks
"""Which rows of an array."""

Activity = Literal["compute", "wait", "transfer"]


def rows_of(workers: list[int]) -> Rows:
    """Return the rows of some workers, of which one alone is cheaper as a number."""
    return workers[0] if len(workers) == 1 else np.array(workers, np.int64)


BY_PAIRS = 64
"""Workers at most for which it is known who has sent how much to whom, and whose course is kept."""


class Sums(NamedTuple):
    """Where the first workers, up to `BY_PAIRS`, have come to at a time, as arrays of `Record` say, [workers]."""

    time: float
    steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    computing: Floats
    waiting: Floats
    bytes: Floats
    pairs: Floats | None
    pulls: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ages: Floats


class Span(NamedTuple):
    """What a worker did from `begin` to `end`, in virtual seconds.

    "transfer" is the receiving of a model from `peer`, which may be beside "compute"; `peer` is -1 where there is none.
    """

    worker: int
    activity: Activity
    begin: float
    end: float
    peer: int


class Record:
    """One run.

    Args:
        spans_until: virtual seconds up to which spans are kept; 0 keeps none.

    Attributes:
        steps: of the optimizer, by worker; int64 [workers], as are `messages` and `pulls`.
        computing: seconds, by worker; float64 [workers], as are `waiting`, `bytes` and `ages`.
        waiting: seconds in which the worker had nothing to do.
        messages: that the worker sent: models, parts of models, and those of the scheduling.
        bytes: in them.
        pairs: the same by worker and receiver, float64 [workers, workers]; None where workers are more than `BY_PAIRS`.
        pulls: models of others, or parts of them, that the worker has averaged into its own.
        ages: seconds, their sum over `pulls`: how long before its use each was copied from the other's parameters.
        oldest: the longest of them all.
        course: the sums at every point of the learning curve.
        curve: {"time": virtual seconds, and what `Problem.evaluate` says}, in the order of time.
        spans: see `Span`.
        warnings: that users of the real algorithm would have seen.
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
        """Note that the workers of these rows have each done a step."""
        self.steps[rows] += 1
        self.computing[rows] += end - begin
        if self._spans_until > 0 and np.any(begin < self._spans_until):
            workers = np.arange(len(self.steps))[rows]
            for worker, since, until in np.nditer([workers, begin, end]):
                self._span(int(worker), "compute", float(since), float(until), -1)

    def waited(self, worker: int, begin: float, end: float, peer: int = -1) -> None:
        """Note that the worker had to wait (for `peer`)."""
        self.waiting[worker] += end - begin
        self._span(worker, "wait", begin, end, peer)

    def sent(self, worker: int, to: int, count: float) -> None:
        """Note that the worker has sent another one a message of so many bytes."""
        self.messages[worker] += 1
        self.bytes[worker] += count
        if self.pairs is not None:
            self.pairs[worker, to] += count

    def sent_all(self, sources: Ranks, targets: Ranks, counts: Floats, rounds: int = 1) -> None:
        """Note so many messages from each of `sources` to the one of `targets`, all of `counts` bytes."""
        workers = len(self.bytes)
        self.messages += rounds * np.bincount(sources, minlength=workers)
        self.bytes += rounds * np.bincount(sources, weights=counts, minlength=workers)
        if self.pairs is not None:
            np.add.at(self.pairs, (sources, targets), rounds * counts)

    def received(self, worker: int, peer: int, begin: float, end: float) -> None:
        """Note that the worker has received a model, between these times."""
        self._span(worker, "transfer", begin, end, peer)

    def used(self, worker: int, age: float) -> None:
        """Note that the worker has averaged a model that was copied `age` seconds ago into its own."""
        self.pulls[worker] += 1
        self.ages[worker] += age
        self.oldest = max(self.oldest, age)

    def evaluated(self, time: float, found: Mapping[str, float]) -> None:
        """Note a point of the learning curve."""
        self.curve.append({"time": time, **found})
        self.course.append(self.sums(time))

    def sums(self, time: float) -> Sums:
        """Return where workers have come to by now, which is `time`."""
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
        """Note a warning; each text is kept once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def _span(self, worker: int, activity: Activity, begin: float, end: float, peer: int) -> None:
        if begin < self._spans_until and end > begin:
            self.spans.append(Span(worker, activity, begin, end, peer))

    def as_dict(self, by_worker: bool) -> dict[str, Any]:
        """Return means over workers (`age`: over all pulls) and the curve, for a JSON file.

        If asked for, every worker's, too.
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
