"""One rank of the part serving of scheduled_pull.py: rank 0 computes, and rank 1 pulls from it, copies or sleeps.

Started by timings.scheduled_pull.serving. Rank 0 controls rank 1 by messages, because it must not wait in a collective
operation while it serves pulls.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

import sordino.torch as hvd
from claims.scheduled_pull.snapshots import Computation, Snapshots
from cluster import jobs
from sordino.report import Results
from sordino.timing import Participants, Run, race, rotated, summarize

WAYS = {  # work of rank 1, and whether rank 0 publishes after each step
    "alone": ("rest", False),
    "neighbour": ("copy", False),
    "pulled": ("pull", False),
    "publishing": ("rest", True),
    "publishing_pulled": ("pull", True),
}
_WARM_UP = 2  # steps of a turn


def serve(snapshots: Snapshots, chosen: argparse.Namespace) -> dict[str, Results]:
    """Take turns of steps in every way, on rank 0."""
    computation = Computation()
    pieces = _pieces(computation, chosen.step_ms / 1e3)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(chosen.rounds):
        for name in rotated(WAYS, number):
            what, publishes = WAYS[name]
            snapshots.tell(1, what)
            for step in range(_WARM_UP + chosen.steps):
                begin = time.perf_counter()
                for _ in range(pieces):
                    computation.piece()
                if publishes:
                    snapshots.publish()
                if step >= _WARM_UP:
                    seconds[name].append(time.perf_counter() - begin)
            snapshots.tell(1, "stop")
            rates[name].append(float(snapshots.hear()))
    snapshots.tell(1, "end")
    found = {}
    for name in WAYS:
        found[name] = {"step": summarize(np.array(seconds[name])), "times_a_second": float(np.median(rates[name]))}
        found[name]["unpublished"] = snapshots.store.unpublished
        turns = np.array(seconds[name]).reshape(chosen.rounds, chosen.steps)
        found[name]["rounds"] = [float(value) for value in np.median(turns, axis=1)]
    return found


def follow(snapshots: Snapshots) -> None:
    """Carry out rank 0's commands on rank 1: repeat the named work until "stop", and reply its rate per second."""
    source, target = torch.ones_like(snapshots.values), torch.ones_like(snapshots.values)
    work: dict[str, Callable[[], object]] = {
        "pull": lambda: snapshots.pull(0),
        "copy": lambda: target.copy_(source),
        "rest": lambda: time.sleep(1e-3),
    }
    while (what := snapshots.hear()) != "end":
        count, begin = 1, time.perf_counter()
        work[what]()
        while snapshots.heard() is None:  # the next message is always "stop"
            work[what]()
            count += 1
        snapshots.tell(0, f"{count / (time.perf_counter() - begin):.6g}")


def _pieces(computation: Computation, seconds: float) -> int:
    """Return the number of pieces that take about `seconds`."""
    took = []
    for _ in range(20):
        begin = time.perf_counter()
        computation.piece()
        took.append(time.perf_counter() - begin)
    return max(1, round(seconds / float(np.median(took))))


def publication(snapshots: Snapshots, budget: float) -> Results:
    """Time a snapshot, and copies of as many bytes to three buffers in turn, as a snapshot has three places."""
    source, turn = snapshots.values, [0]
    targets = [torch.ones_like(source) for _ in range(3)]
    arrays = [target.numpy() for target in targets]

    def place() -> int:
        turn[0] = (turn[0] + 1) % 3
        return turn[0]

    ways: dict[str, Run] = {
        "publish": snapshots.publish,
        "torch": lambda: targets[place()].copy_(source),
        "numpy": lambda: np.copyto(arrays[place()], source.numpy()),
    }
    return {name: one.summary() for name, one in race(ways, Participants(), budget, warmup=6).items()}


def measure(chosen: argparse.Namespace) -> Results:
    """Measure every size. Collective."""
    found: Results = {"cores_per_rank": len(os.sched_getaffinity(0)), "sizes": []}
    for size in chosen.sizes:
        snapshots = Snapshots(size)
        row: Results = {"bytes": size}
        if hvd.rank() == 0:
            row["publication"] = publication(snapshots, chosen.budget)
            row["ways"] = serve(snapshots, chosen)
        elif hvd.rank() == 1:
            follow(snapshots)
        snapshots.close()
        found["sizes"].append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run on both ranks."""
    options = argparse.ArgumentParser(prog="scheduled_pull_serving_worker", description=__doc__)
    options.add_argument("--sizes", type=int, nargs="+", required=True, metavar="N", help="bytes of a model")
    options.add_argument("--step-ms", type=float, required=True, metavar="MS", help="that a step computes, about")
    options.add_argument("--steps", type=int, required=True, metavar="N", help="of a turn")
    options.add_argument("--rounds", type=int, required=True, metavar="N", help="turns of each way")
    options.add_argument("--budget", type=float, required=True, metavar="S", help="for publication, a size")
    chosen = options.parse_args(argv)
    return jobs.work(lambda _: measure(chosen))


if __name__ == "__main__":
    raise SystemExit(main())
