"""Writer of the results of simulations, in the format of training records (`sordino.record`), in virtual seconds.

A folder holds one run, or one folder per run. Each worker has a file, up to a number of workers. The first worker's
file has the learning curve, which is of all workers. A line sums up the steps between two points of the curve.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

from sordino.record.writing import Lines, job_file, jsonable, rank_file, removed_after_error
from sordino.simulate.choices import Run
from sordino.simulate.job import Outcome
from sordino.simulate.record import BY_PAIRS, Record, Span, Sums

_WHAT = {"compute": "compute", "wait": "wait", "transfer": "move"}


class Records:
    """Records of the runs of a command. They are opened before the runs begin.

    Args:
        folder: the folder of all records.
        runs: the runs, in order.
        setting: description of the simulation.

    Raises:
        UsageError: there is a record already, or the folder cannot be written.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], setting: str) -> None:
        names = [re.sub(r"[^\w.-]+", "-", f"{run.mode}-seed-{run.job.seed}") for run in runs]
        self._folders = [folder / name if len(runs) > 1 else folder for name in names]
        self._jobs: list[Lines] = []
        with self.removed_after_error():
            for place, run in zip(self._folders, runs, strict=True):
                said = {"Mode": run.mode, "Workers": run.job.workers, "Setting": setting, "Seed": run.job.seed}
                algorithm = run.job.algorithm.written()
                self._jobs.append(job_file(place, "simulation", clock="virtual", algorithm=algorithm, setting=said))

    def removed_after_error(self) -> AbstractContextManager[None]:
        """Return a context that removes the records if its block raises."""
        return removed_after_error(self._jobs)

    def write(self, runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
        """Write the results."""
        for place, job, run, outcome in zip(self._folders, self._jobs, runs, outcomes, strict=True):
            for worker in range(min(run.job.workers, BY_PAIRS)):
                _write_worker(place, worker, run, outcome)
            job.write("start", number=0, time=0.0)
            job.write("end", number=0, time=outcome.seconds, status=0, why="all virtual seconds have passed")
            job.close()


def _write_worker(folder: Path, worker: int, run: Run, outcome: Outcome) -> None:
    record, dead = outcome.record, dict(run.job.kills).get(worker, math.inf)
    file = rank_file(folder, worker, size=run.job.workers, start=0, time=0.0)
    if worker == 0:
        for point in record.curve:
            values = {name: value for name, value in point.items() if name != "time"}
            file.write("metrics", step=None, time=point["time"], values=jsonable(values))
    for begin, end in _stretches(record, worker, outcome.seconds):
        _write_steps(file, worker, begin, end)
    steps = int(record.steps[worker])
    spans = list(_spans(record, worker))
    if spans:
        file.write("spans", step=steps, spans=spans)
    if dead <= outcome.seconds:
        file.write("fault", step=steps, time=dead, text=f"It died at virtual second {dead:g}.")
    else:
        file.write("end", step=steps, time=outcome.seconds)
    file.close()


def _stretches(record: Record, worker: int, seconds: float) -> list[tuple[Sums, Sums]]:
    """Return the intervals between points of the curve in which a worker has taken a step."""
    points = [record.course[0]]
    for sums in [*record.course[1:], record.sums(seconds)]:
        if sums.steps[worker] > points[-1].steps[worker]:
            points.append(sums)
    if len(points) > 1:
        points[-1] = record.sums(points[-1].time)  # no other line counts the time after the last step
    return list(pairwise(points))


def _write_steps(file: Lines, worker: int, begin: Sums, end: Sums) -> None:
    steps, waited = int(end.steps[worker]), float(end.waiting[worker] - begin.waiting[worker])
    if end.pairs is not None and begin.pairs is not None:
        counts = end.pairs[worker] - begin.pairs[worker]
        sent = {str(peer): float(count) for peer, count in enumerate(counts) if count > 0}
    else:
        sent = {"all others": float(end.bytes[worker] - begin.bytes[worker])}
    file.write(
        "step", step=steps, steps=steps - int(begin.steps[worker]), time=end.time,
        seconds=waited + float(end.computing[worker] - begin.computing[worker]), exposed=waited, busy=None, sent=sent,
    )  # fmt: skip
    pulls = int(end.pulls[worker] - begin.pulls[worker])
    if pulls:
        age = float(end.ages[worker] - begin.ages[worker]) / pulls
        file.write("ages", step=steps, time=end.time, count=pulls, pulls=[[age, None, None]])


def _spans(record: Record, worker: int) -> Iterable[list[Any]]:
    """Yield a worker's spans, and after each wait its reason: the rank whose data arrived last in it."""
    mine = [span for span in record.spans if span.worker == worker]
    transfers = [span for span in mine if span.activity == "transfer"]
    for span in mine:
        yield [_WHAT[span.activity], span.begin, span.end, -1, 0, ""]
        if span.activity == "wait":
            reason = _reason(span, transfers)
            if reason is not None:
                yield ["meet", *reason, 0, ""]


def _reason(wait: Span, transfers: Sequence[Span]) -> tuple[float, float, int] | None:
    """Return begin, end and peer of the wait for a peer. In the rest of the wait data were in flight."""
    if wait.peer >= 0:
        return wait.begin, wait.end, wait.peer
    inside = [one for one in transfers if one.begin < wait.end and one.end > wait.begin]
    if not inside:
        return None
    last = max(inside, key=lambda one: one.end)
    return (wait.begin, last.begin, last.peer) if last.begin > wait.begin else None
