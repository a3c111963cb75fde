"""One rank of the parameter skipping benchmark over links: real training, and what its steps wait for communication.

Started by claims.skipping.communication; rank 0 prints what it found as a line of JSON. Hosts share the cores,
so ranks come out of backward at different times; they meet in a barrier before the step, and what they wait there does
not count. AllReduce communicates while backward runs: its ranks meet before that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from claims.accuracy.training import load
from claims.skipping.training import BATCH, RATE, all_equal, make_network
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, ParameterSkipping
from sordino.report import Results
from sordino.timing import Participants, Seconds, summarize

_IMAGES = {"fashion-mnist": 20000, "digits": 1280}
_HELD_OUT = 0


def contestants() -> dict[str, Algorithm]:
    """Without skipping, with it, and the ordinary way: averaging gradients."""
    usual = ParameterSkipping()
    return {
        "unskipped": replace(usual, threshold=101.0),
        "naive": usual,
        "random": replace(usual, detector="random"),
        "history": replace(usual, detector="history"),
        "naive, blocks": replace(usual, granularity="block"),
        "naive, parameter server": replace(usual, exchange="parameter-server"),
        "naive, blocks, parameter server": replace(usual, exchange="parameter-server", granularity="block"),
        "AllReduce": AllReduce(),
    }


class Training:
    """A network of this rank's that goes through the images step by step.

    Attributes:
        exposed, rest: seconds of each measured step that waited for communication, and that optimizer.step() took
            beside that.
        sent: bytes in all of them.
    """

    def __init__(self, algorithm: Algorithm, data: str, data_dir: str | None) -> None:
        self._images, self._labels = load(data, data_dir, _IMAGES[data], _HELD_OUT)["train"]
        self.model = make_network(self._images.shape[2], seed=1)
        sgd = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), algorithm=algorithm)
        self._early = isinstance(algorithm, AllReduce)
        self._skips = isinstance(algorithm, ParameterSkipping)
        self._done = 0
        self.exposed: list[float] = []
        self.rest: list[float] = []
        self.sent = 0.0

    def _loss(self) -> torch.Tensor:
        begin = (self._done * hvd.size() + hvd.rank()) * BATCH % (len(self._labels) - BATCH)
        self._done += 1
        rows = slice(begin, begin + BATCH)
        return nn.functional.cross_entropy(self.model(self._images[rows]), self._labels[rows])

    def step(self, participants: Participants, measured: bool) -> None:
        """One step. Collective."""
        self.optimizer.zero_grad()
        loss = self._loss()
        if not self._early:
            loss.backward()
        participants.barrier()
        before = hvd.stats()
        if self._early:
            loss.backward()
        begin = time.perf_counter()
        self.optimizer.step()
        seconds, after = time.perf_counter() - begin, hvd.stats()
        if measured:
            exposed = after["exposed_seconds"] - before["exposed_seconds"]
            self.exposed.append(exposed)
            self.rest.append(max(seconds - exposed, 0.0))
            self.sent += after["bytes_sent"] - before["bytes_sent"]

    def results(self, participants: Participants, warm_up: int) -> Results:
        """Of all measured steps, the slowest rank's times and the mean rank's bytes. Collective."""
        self.optimizer.flush()
        steps = len(self.exposed)
        sent = float(hvd.allreduce(torch.tensor([self.sent], dtype=torch.float64), name="bench.sent")) / steps
        exposed, rest = (participants.maximum(np.array(values)) for values in (self.exposed, self.rest))
        found: Results = {"exposed": _with_mean(exposed), "rest": _with_mean(rest), "bytes": sent}
        found["right"] = all_equal(self.model)
        if self._skips:
            points = [point for point in self.optimizer.statistics.points if point.step > warm_up]
            found["share"] = sum(point.bytes_sent for point in points) / sum(point.bytes_unskipped for point in points)
        return found


def _with_mean(values: Seconds) -> dict[str, float]:
    return summarize(values) | {"mean": float(values.mean())}


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Every contestant warms up for so many turns, then they take turns. Collective."""
    warm_up = chosen.warm_up * chosen.steps
    trainings = {}
    for name, algorithm in contestants().items():
        if isinstance(algorithm, ParameterSkipping):
            algorithm = replace(algorithm, statistics_interval=chosen.steps)
        trainings[name] = Training(algorithm, chosen.data, chosen.data_dir)
    for one in trainings.values():
        for _ in range(warm_up):
            one.step(participants, measured=False)
    names = list(trainings)
    for number in range(chosen.turns):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            for _ in range(chosen.steps):
                trainings[name].step(participants, measured=True)
    parameters = sum(parameter.numel() for parameter in trainings["unskipped"].model.parameters())
    found = {name: one.results(participants, warm_up) for name, one in trainings.items()}
    return {"parameters": parameters, "contestants": found}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs on all ranks."""
    options = argparse.ArgumentParser(prog="skipping_worker", description=__doc__)
    options.add_argument("--data", choices=_IMAGES, required=True)
    options.add_argument("--data-dir", metavar="DIR")
    options.add_argument("--warm-up", type=int, required=True, metavar="N", help="turns before those that are measured")
    options.add_argument("--turns", type=int, required=True, metavar="N", help="of each contestant")
    options.add_argument("--steps", type=int, required=True, metavar="N", help="of a turn")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
