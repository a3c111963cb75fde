"""One rank of Figure 8(a)'s job: whole steps with each detector and with the plain all-reduce, in turns.

Started by `measure`. The model has ResNet-50's parameters. Its backward computes for a given time and yields gradients
one by one, so that AllReduce communicates during backward, as DDP does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch

import sordino.torch as hvd
from claims.caps.detection import DETECTORS
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, CaPS, LocalSGD
from sordino.bench.resnet import Model, Work
from sordino.report import Results
from sordino.timing import Participants, race

BASELINE, AVERAGING = "AllReduce", "averaging"
RANKS = 2
_NEVER = 101.0  # percent, so that nothing is skipped


def contestants() -> dict[str, Algorithm]:
    """Return all-reduce of gradients, and averaging of parameters without detection and with each detector."""
    skipping: dict[str, Algorithm] = {name: CaPS(name, threshold=_NEVER) for name in DETECTORS}
    return {BASELINE: AllReduce(), AVERAGING: LocalSGD(interval=1, exchange="allreduce"), **skipping}


def step_of(algorithm: Algorithm, work: Work, pieces: int, narrow: int) -> Callable[[], None]:
    """Return a function that takes one step with its own model."""
    model = Model(work, pieces, 1e-3, narrow)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    signal = torch.ones(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(signal).sum().backward()
        optimizer.step()

    return step


def run(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Return the milliseconds per step of each contestant, as the mean of each round. Collective."""
    work = Work()
    longest = participants.maximum(np.array([work.piece_seconds()]))
    pieces = round(chosen.compute_ms / 1000 / float(longest[0]))
    steps = {name: step_of(one, work, pieces, chosen.narrow) for name, one in contestants().items()}
    samples = race(steps, participants, chosen.budget, rounds=chosen.rounds)
    return {"ms": {name: [1000 * float(part.mean()) for part in one.rounds] for name, one in samples.items()}}


def measure(narrow: int, compute_ms: float, budget: float, rounds: int) -> Results:
    """Run the job on this machine.

    Args:
        narrow: divisor of ResNet-50's widths.
        compute_ms: computation of backward in a step, in ms.
        budget: seconds.
        rounds: number of turns of each contestant.
    """
    settings = {"narrow": narrow, "compute-ms": compute_ms, "budget": budget, "rounds": rounds}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    found = jobs.run_here(RANKS, "claims.caps.step_worker", words, "local")
    return {"ms": found["ms"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="step_worker", description=__doc__)
    options.add_argument("--narrow", type=int, required=True, metavar="N")
    options.add_argument("--compute-ms", type=float, required=True, metavar="MS")
    options.add_argument("--budget", type=float, required=True, metavar="S")
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: run(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
