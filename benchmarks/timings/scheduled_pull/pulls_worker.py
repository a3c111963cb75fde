"""One rank of the part pulls of scheduled_pull.py: steps that sleep, and the time that they wait for averaging.

Started by timings.scheduled_pull.pulls on emulated hosts. Every turn of a contestant has its own optimizer, with a
warm-up in which the optimizer learns the times of windows and pulls. An optimizer cannot be kept for the next turn,
because its schedule follows the clock.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import Algorithm, Crossover, LocalSGD, ScheduledPull
from sordino.report import Results
from sordino.timing import Participants, rotated

_BLOCKS = 16  # blocks of the model, which Crossover exchanges one by one
_RATE = 1e-3
_ROUNDINGS = 1e-4  # largest relative difference between elements with the same exact value


def contestants(interval: int) -> dict[str, Algorithm | None]:
    """Return all contestants by name; None averages nothing."""
    return {
        "alone": None,
        "none": ScheduledPull(interval=interval, overlap="none"),
        "naive": ScheduledPull(interval=interval, overlap="naive"),
        "manager": ScheduledPull(interval=interval, schedule="manager"),
        "autonomous": ScheduledPull(interval=interval, schedule="autonomous"),
        "local_sgd": LocalSGD(interval=interval, exchange="allreduce"),
        "crossover": Crossover(interval=interval),
    }


class Training:
    """Steps that sleep.

    In the first step of each window all parameters of a rank change by the same number, which differs between ranks. So
    a model that mixes two snapshots has unequal elements.
    """

    def __init__(self, algorithm: Algorithm | None, model_bytes: int, seconds: float, interval: int) -> None:
        count = model_bytes // 4 // _BLOCKS
        named = [(f"block{k}.weight", torch.nn.Parameter(torch.zeros(count))) for k in range(_BLOCKS)]
        self.parameters = [parameter for _, parameter in named]
        sgd = torch.optim.SGD(self.parameters, lr=_RATE)
        self._whole = isinstance(algorithm, ScheduledPull)  # averages whole models, not blocks
        self.optimizer: Any = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm) if algorithm else sgd
        self._seconds, self._interval = seconds, interval
        self._gradient = torch.tensor(-(hvd.rank() + 1.0)).expand(count)
        self._windows = 0

    def run(self, windows: int) -> None:
        """Take the steps of some windows."""
        for _ in range(windows):
            for step in range(self._interval):
                time.sleep(self._seconds)
                for parameter in self.parameters:
                    parameter.grad = self._gradient if step == 0 else None
                self.optimizer.step()
        self._windows += windows

    def counters(self) -> Results:
        """Return the counters of this rank."""
        found: Results = {key: hvd.stats()[key] for key in ("exposed_seconds", "bytes_sent")}
        return found | self.optimizer.statistics.as_dict() if self._whole else found

    def is_right(self) -> bool:
        """Return whether every block (with pulls: the whole model) has equal elements and a possible value.

        An all-reduce between hosts adds up the parts of a block in different orders, so elements differ in roundings.
        """
        ends = torch.stack([torch.stack(parameter.detach().aminmax()) for parameter in self.parameters]).double()
        equal = (0, 1) if self._whole else 1  # dimensions whose values should be equal
        low, high = ends.amin(equal), ends.amax(equal)
        most = _RATE * hvd.size() * self._windows * (1 + _ROUNDINGS)
        return bool((low > 0).all() and (high <= most).all() and (high - low <= _ROUNDINGS * high).all())


def turn(algorithm: Algorithm | None, chosen: argparse.Namespace) -> list[Results]:
    """Take one turn of a contestant; return the results of all ranks in their order. Collective."""
    training = Training(algorithm, chosen.model_bytes, chosen.compute_ms / 1e3, chosen.interval)
    hvd.barrier()
    training.run(chosen.warm_up)
    before, begin = training.counters(), time.perf_counter()
    training.run(chosen.windows)
    seconds, after = time.perf_counter() - begin, training.counters()
    found: Results = {"step": seconds / (chosen.windows * chosen.interval), "right": training.is_right()}
    waited = "waited" if "waited" in after else "exposed_seconds"
    found["waited"] = (after[waited] - before[waited]) / chosen.windows
    found["bytes"] = (after["bytes_sent"] - before["bytes_sent"]) / chosen.windows
    for name in ("pulls", "failed", "messages", "unpublished"):
        if name in after:
            found[name] = (after[name] - before[name]) / chosen.windows
    for name in ("ages", "seconds", "behind"):
        if name in after:
            found[name] = [round(value, 6) for value in after[name][len(before[name]) :]]
    told: list[Results] = hvd.allgather_object(found, name="bench.turn")
    training.optimizer = None
    del training
    gc.collect()  # so that its threads end here, not during the next turn
    hvd.barrier()
    return told


def measure(chosen: argparse.Namespace) -> Results:
    """Take --rounds turns of every contestant. Collective."""
    everybody = contestants(chosen.interval)
    rounds: dict[str, list[list[Results]]] = {name: [] for name in everybody}
    for number in range(chosen.rounds):
        for name in rotated(everybody, number):
            rounds[name].append(turn(everybody[name], chosen))
    return {"rounds": rounds}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="scheduled_pull_pulls_worker", description=__doc__)
    options.add_argument("--model-bytes", type=int, required=True, metavar="N")
    options.add_argument("--compute-ms", type=float, required=True, metavar="MS", help="that a step sleeps")
    options.add_argument("--interval", type=int, required=True, metavar="T", help="steps of a window")
    options.add_argument("--warm-up", type=int, required=True, metavar="N", help="windows of a turn before the others")
    options.add_argument("--windows", type=int, required=True, metavar="N", help="that are measured in a turn")
    options.add_argument("--rounds", type=int, required=True, metavar="N", help="turns of each contestant")
    chosen = options.parse_args(argv)

    def work(_: Participants) -> Results:
        return measure(chosen)

    return jobs.work(work)


if __name__ == "__main__":
    raise SystemExit(main())
