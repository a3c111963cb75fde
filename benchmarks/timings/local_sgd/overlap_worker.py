"""One rank of the benchmark of overlapped gathers: times of `step()` and of a whole step, with loading of a batch.

Started by timings.local_sgd.overlap. Both variants train the same model in turns. Loading is a sleep.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import LocalSGD
from sordino.report import Results
from sordino.timing import Participants

LOADS = (0.0, 0.5, 1.0, 2.0)
"""Time of loading, as a multiple of the time of a `step()` that waits."""
_WARM_UP = 3
_BATCH = 8


class Contestant:
    """A model of equal layers, and its sharded optimizer."""

    def __init__(self, overlap: bool, participants: Participants, layers: int, width: int) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        algorithm = LocalSGD(1, participants.size, bucket_bytes=4 * width * (width + 1), overlap=overlap)
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1e-3), self.model.named_parameters(), algorithm=algorithm
        )
        self._inputs = torch.randn(_BATCH, width, generator=torch.Generator().manual_seed(participants.rank))
        self._participants = participants

    def step(self, load: float) -> tuple[float, float]:
        """Train on a batch; return the seconds of `step()`, and of the whole step without the `load` seconds."""
        self._participants.barrier()
        begin = time.perf_counter()
        self.model(self._inputs).square().mean().backward()
        ready = time.perf_counter()
        self._optimizer.step()
        stepped = time.perf_counter()
        self._optimizer.zero_grad()
        time.sleep(load)
        loaded = time.perf_counter()
        self.model(self._inputs)
        return stepped - ready, time.perf_counter() - begin - (loaded - stepped)


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Time both variants in turns with every load. Collective."""
    both = [Contestant(overlap, participants, chosen.layers, chosen.width) for overlap in (False, True)]
    before = np.array([[one.step(0.0)[0] for one in both] for _ in range(_WARM_UP + 5)])
    whole = float(np.median(participants.maximum(before[_WARM_UP:, 0])))
    seconds = np.empty((len(LOADS), chosen.rounds, len(both), 2))
    for number in range(chosen.rounds):
        for index, load in enumerate(LOADS):
            for place in (0, 1) if number % 2 else (1, 0):
                seconds[index, number, place] = both[place].step(load * whole)
    slowest = participants.maximum(seconds.ravel()).reshape(seconds.shape)
    ratios = np.median(slowest[:, :, 1] / slowest[:, :, 0], axis=1)
    pairs = zip(both[0].model.parameters(), both[1].model.parameters())
    same = all(torch.equal(mine, theirs) for mine, theirs in pairs)
    right = bool(participants.maximum(np.array([float(not same)]))[0] == 0)
    entry = {f"{load:g}": {"step": float(step), "all": float(every)} for load, (step, every) in zip(LOADS, ratios)}
    return {"contestants": {"overlap": {"right": right, "ratios": entry}}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="overlap_worker", description=__doc__)
    options.add_argument("--layers", type=int, required=True, metavar="N")
    options.add_argument("--width", type=int, required=True, metavar="N")
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
