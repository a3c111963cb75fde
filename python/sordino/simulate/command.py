"""`sordino simulate`: runs all simulations of a plan, several at a time, and reports their results."""

from __future__ import annotations

import argparse
import json
import os
import queue
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.progress import TaskID, TaskProgressColumn

from sordino import checkpoint
from sordino.algorithms.base import load
from sordino.pool import SPAWN, pool
from sordino.progress import bar
from sordino.record.writing import jsonable
from sordino.simulate import pictures, report
from sordino.simulate.checks import check
from sordino.simulate.choices import Run, plan_of
from sordino.simulate.job import Job, Outcome, Progress
from sordino.simulate.recording import Records

_FIRST, _LINE = 3.0, 10.0  # seconds until the first line of progress, and between lines, if there is no bar
WORLDS = {"averaging": "sordino.simulate.averaging:Averaging", "pulling": "sordino.simulate.pulling:Pulling"}
"""Classes by their names in `Simulation.world`. Only the one that is used is imported."""
_POLL = 0.2  # seconds

RunProgress = tuple[int, float]
"""Number of a run, and its completed fraction."""


def main(options: argparse.Namespace) -> int:
    """Simulate, print the table, and write the files. Return the exit status.

    Raises:
        UsageError: an option is wrong. NotBuilt: a package is missing.
    """
    begin = time.monotonic()
    plan = plan_of(options)
    if not options.quiet:
        print(report.setting(plan), flush=True)
    records = None if options.record is None else Records(options.record, plan.runs, report.setting(plan))
    with nullcontext() if records is None else records.removed_after_error():
        outcomes = _run_all(plan.runs, options.processes, options.quiet)
    results = report.results(plan, outcomes)
    results["wall_seconds"] = time.monotonic() - begin
    print(report.text(plan, results), flush=True)
    if options.json is not None:
        with checkpoint.atomic_file(options.json) as file:
            file.write(json.dumps(jsonable(results), indent=1).encode() + b"\n")
    if records is not None:
        records.write(plan.runs, outcomes)
    first = {run.mode: outcome for run, outcome in reversed(list(zip(plan.runs, outcomes, strict=True)))}
    if options.plot is not None:
        pictures.save(options.plot, lambda figure: pictures.curves(results, figure))
    if options.gantt is not None:
        shown = {run.mode: first[run.mode].record.spans for run in plan.runs}
        pictures.save(options.gantt, lambda figure: pictures.gantt(shown, plan.runs[0].job.spans_until, figure))
    return 0


def simulate(job: Job, progress: Progress) -> Outcome:
    """Run one simulation in this thread."""
    outcome = _trained(job, progress)
    if job.failures is None:
        return outcome
    from sordino.simulate import failures, lockstep

    return replace(outcome, goodput=failures.goodput_of(job, lockstep.messages_of(job), job.failures))


def _trained(job: Job, progress: Progress) -> Outcome:
    world = job.algorithm.simulation.world
    if world is not None:
        check(job)
        outcome: Outcome = load(WORLDS.get(world, world))(job, progress).run()
        return outcome
    from sordino.simulate import lockstep

    return lockstep.run(job, progress)


def _run_all(runs: list[Run], processes: int | None, quiet: bool) -> list[Outcome]:
    """Return the outcomes in the order of the runs."""
    processes = min(len(runs), processes or len(os.sched_getaffinity(0)))
    with _teller(runs, quiet) as reporter:
        if processes == 1:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                return [_here(number, run, reporter) for number, run in enumerate(runs)]
            finally:
                torch.set_num_threads(threads)
        return _in_processes(runs, processes, reporter)


def _here(number: int, run: Run, reporter: _Teller) -> Outcome:
    outcome = simulate(run.job, lambda part: reporter.part(number, part))
    reporter.done(number, outcome)
    return outcome


def _in_processes(runs: list[Run], processes: int, reporter: _Teller) -> list[Outcome]:
    channel: Any = SPAWN.Queue()
    found: dict[int, Outcome] = {}
    with pool(processes, _begin, channel) as workers:
        waiting: dict[Future[Outcome], int] = {
            workers.submit(_there, number, run.job): number for number, run in enumerate(runs)
        }
        while waiting:
            ended, _ = wait(waiting, _POLL, FIRST_COMPLETED)
            for number, part in _drained(channel):
                reporter.part(number, part)
            for future in ended:
                number = waiting.pop(future)
                found[number] = future.result()
                reporter.done(number, found[number])
    return [found[number] for number in range(len(runs))]


def _drained(channel: Any) -> Iterator[RunProgress]:
    while True:
        try:
            yield channel.get_nowait()
        except queue.Empty:
            return


_channel: Any = None


def _begin(channel: Any) -> None:
    """Initialize a process of the pool."""
    global _channel
    _channel = channel
    torch.set_num_threads(1)


def _there(number: int, job: Job) -> Outcome:
    return simulate(job, lambda part: _channel.put((number, part)))


class _Teller:
    """Progress of the runs: a bar for each on a terminal, else a line from time to time."""

    def __init__(self, runs: list[Run], quiet: bool) -> None:
        self._runs, self._quiet = runs, quiet
        self.bar = None if quiet else bar(TaskProgressColumn())
        self._tasks: dict[int, TaskID] = {}
        self._begun: dict[int, float] = {}
        self._parts = [0.0] * len(runs)
        self._next = time.monotonic() + _FIRST
        self._all: TaskID | None = None
        if self.bar is not None and len(runs) > 1:
            self._all = self.bar.add_task(f"all {len(runs)} runs", total=1.0)

    def part(self, number: int, part: float) -> None:
        """Show the completed fraction of a run."""
        self._begun.setdefault(number, time.monotonic())
        self._parts[number] = part
        if self.bar is not None:
            if number not in self._tasks:
                self._tasks[number] = self.bar.add_task(self._runs[number].title, total=1.0)
            self.bar.update(self._tasks[number], completed=part)
            if self._all is not None:
                self.bar.update(self._all, completed=sum(self._parts) / len(self._parts))
        elif not self._quiet and part < 1 and time.monotonic() > self._next:
            self._next = time.monotonic() + _LINE
            print(self.line(time.monotonic()), flush=True)

    def line(self, now: float) -> str:
        """Return the progress of all runs, and the estimated remaining time."""
        done = sum(self._parts) / len(self._parts)
        runs = f"{len(self._runs)} runs" if len(self._runs) > 1 else "the run"
        if done == 0:
            return f"  0% of {runs}"
        rest = (now - min(self._begun.values())) * (1 - done) / done
        return f"{done:4.0%} of {runs}, about {_about(rest)} more"

    def done(self, number: int, outcome: Outcome) -> None:
        """Show the end of a run."""
        self.part(number, 1.0)
        seconds = time.monotonic() - self._begun[number]
        line = f"{self._runs[number].title}: {report.score(outcome.final)} after {outcome.seconds:.4g} virtual seconds"
        if self.bar is not None:
            self.bar.remove_task(self._tasks.pop(number))
            self.bar.console.print(line, markup=False, highlight=False)
        elif not self._quiet:
            print(f"{line} ({seconds:.0f} s)", flush=True)


def _about(seconds: float) -> str:
    """Return a rounded time, such as 40 s, 3 min or 2.5 h."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def _teller(runs: list[Run], quiet: bool) -> Iterator[_Teller]:
    teller = _Teller(runs, quiet)
    if teller.bar is None:
        yield teller
        return
    with teller.bar:
        yield teller
