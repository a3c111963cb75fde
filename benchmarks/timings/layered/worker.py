"""One rank of the Layered SGD benchmark: time that a step waits for communication when a batch is loaded after it.

Started by layered.py; rank 0 prints its results as a line of JSON. There is no computation, and loading is a sleep. A
step averages existing gradients, sleeps, and accesses a parameter, as a forward pass would.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from claims.local_sgd.worker import resnet20_shapes
from cluster import jobs
from sordino.algorithms import AllReduce, Layered
from sordino.bench import baselines
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results
from sordino.timing import Participants, summarize

SETS = {"resnet20": resnet20_shapes, "resnet50": resnet50_shapes}
LOADS = (0.0, 0.5, 1.0, 2.0)
"""Time of loading, as a multiple of the time of AllReduce (or Horovod) without loading."""
_WARM_UP = 3


class IdleSGD(torch.optim.SGD):
    """Optimizer whose step does nothing. It is a class because Horovod derives from it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.0)

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


class Contestant:
    """A wrapped optimizer that averages constant gradients."""

    def __init__(self, name: str, set_name: str, participants: Participants, wrap: Any, algorithm: Any = None) -> None:
        self.name, self._participants = name, participants
        self._parameters = []
        named = []
        for label, shape in SETS[set_name]():
            parameter = torch.nn.Parameter(torch.zeros(tuple(shape)))
            parameter.grad = torch.full_like(parameter, float(participants.rank))
            named.append((label, parameter))
            self._parameters.append(parameter)
        settings = {} if algorithm is None else {"algorithm": algorithm}
        self._optimizer = wrap(IdleSGD(self._parameters), named_parameters=named, **settings)

    def step(self, load: float) -> float:
        """Return the seconds of a step without loading."""
        self._participants.barrier()
        begin = time.perf_counter()
        self._optimizer.step()
        middle = time.perf_counter()
        if load > 0:
            time.sleep(load)
        loaded = time.perf_counter()
        self._parameters[0].detach()
        return time.perf_counter() - loaded + middle - begin

    @property
    def right(self) -> bool:
        """Whether all gradients equal the mean over the ranks. Collective."""
        mean = (self._participants.size - 1) / 2
        wrong = any(not torch.all(torch.eq(one.grad, mean)) for one in self._parameters if one.grad is not None)
        return bool(self._participants.maximum(np.array([float(wrong)]))[0] == 0)


def race(contestants: Sequence[Contestant], participants: Participants, rounds: int) -> Results:
    """Time every contestant with every load, in turns. The unit of loads is the first one's step. Collective."""
    for one in contestants:
        for _ in range(_WARM_UP):
            one.step(0.0)
    whole = float(np.median(participants.maximum(np.array([contestants[0].step(0.0) for _ in range(5)]))))
    seconds = {one.name: {load: np.empty(rounds) for load in LOADS} for one in contestants}
    for number in range(rounds):
        for load in LOADS:
            for one in [*contestants[number % len(contestants) :], *contestants[: number % len(contestants)]]:
                seconds[one.name][load][number] = one.step(load * whole)
    entries = {}
    for one in contestants:
        slowest = {load: participants.maximum(values) for load, values in seconds[one.name].items()}
        exposed = {f"{load:g}": summarize(values) for load, values in slowest.items()}
        entries[one.name] = {"exposed": exposed, "right": one.right}
    return {"whole": whole, "contestants": entries}


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Time AllReduce and Layered. Collective."""
    algorithms = {"AllReduce": AllReduce(), "Layered": Layered(chosen.members, chosen.communicator)}
    contestants = [
        Contestant(name, chosen.set, participants, hvd.DistributedOptimizer, algorithm)
        for name, algorithm in algorithms.items()
    ]
    return race(contestants, participants, chosen.rounds)


def horovod(chosen: argparse.Namespace) -> int:
    """Time Horovod alone, because its thread would slow others down. Print {"missing": REASON} if it is not found."""
    participants, problem = baselines.start()
    found = baselines.open_all(["horovod"], participants)
    results: Results = {"missing": problem or found.notes["horovod"]}
    if found.horovod is not None:
        with found.horovod_turn():
            contestant = Contestant("Horovod", chosen.set, participants, found.horovod.DistributedOptimizer)
            results = race([contestant], participants, chosen.rounds) | {"version": found.notes["horovod"]}
    if participants.rank == 0:
        print(json.dumps(results), flush=True)
    found.close()
    hvd.shutdown()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="layered_worker", description=__doc__)
    options.add_argument("--set", choices=SETS, required=True)
    options.add_argument("--members", type=int, required=True, metavar="K")
    options.add_argument("--communicator", choices=("thread", "rank", "horovod"), required=True)
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    if chosen.communicator == "horovod":
        return horovod(chosen)
    layered = Layered(chosen.members, chosen.communicator)
    return jobs.work(lambda participants: measure(chosen, participants), layered)


if __name__ == "__main__":
    raise SystemExit(main())
