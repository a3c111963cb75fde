"""One rank of a job that measures and predicts the times of averaging gradients and models in local SGD.

Started by claims.local_sgd.timed and timings.local_sgd.communication; rank 0 prints its results as a line of JSON.
There is no computation: a step averages gradients that exist before it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from sordino import plan
from sordino.algorithms import Algorithm, AllReduce, LocalSGD
from sordino.plan.links import idle_sgd
from sordino.report import Results
from sordino.timing import Participants, Seconds, summarize

INTERVAL = 2  # steps: one without and one with averaging
Shapes = list[tuple[str, tuple[int, ...]]]


def resnet20_shapes() -> Shapes:
    """Return the 0.27 M parameters of ResNet-20 for images of 32 x 32 (He et al. 2015, section 4.2)."""
    shapes: Shapes = [("conv1.weight", (16, 3, 3, 3)), ("bn1.weight", (16,)), ("bn1.bias", (16,))]
    into = 16
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(3):
            for number, source in ((1, into), (2, width)):
                prefix = f"layer{stage}.{block}"
                shapes.append((f"{prefix}.conv{number}.weight", (width, source, 3, 3)))
                shapes += [(f"{prefix}.bn{number}.{part}", (width,)) for part in ("weight", "bias")]
            into = width
    return [*shapes, ("fc.weight", (10, 64)), ("fc.bias", (10,))]


def edsr_shapes() -> Shapes:
    """Return the 40.7 M parameters of EDSR (Lim et al. 2017): 32 blocks of 256 channels, twice the resolution."""

    def conv(name: str, out: int, into: int) -> Shapes:
        return [(f"{name}.weight", (out, into, 3, 3)), (f"{name}.bias", (out,))]

    shapes = conv("head", 256, 3)
    for block in range(32):
        shapes += conv(f"body.{block}.conv1", 256, 256) + conv(f"body.{block}.conv2", 256, 256)
    return [*shapes, *conv("body.32", 256, 256), *conv("upsample", 1024, 256), *conv("tail", 3, 256)]


SETS = {"resnet20": resnet20_shapes, "edsr": edsr_shapes}


def contestants(members: int) -> dict[str, Algorithm]:
    """Return synchronous SGD, and local SGD in groups of `members` that averages whole models or shards."""
    found: dict[str, Algorithm] = {
        "synchronous": AllReduce(),
        "allreduce": LocalSGD(INTERVAL, members, "allreduce"),
    }
    return found | ({"sharded": LocalSGD(INTERVAL, members, "sharded")} if members > 1 else {})


def times(algorithm: Algorithm, shapes: Shapes, participants: Participants, rounds: int) -> tuple[Seconds, bool]:
    """Return the slowest rank's seconds [rounds, 2] of steps without and with averaging, and whether models are right.

    Collective.
    """
    members = algorithm.workers_in_group if isinstance(algorithm, LocalSGD) else participants.size
    group = participants.rank // members
    named = [(name, torch.nn.Parameter(torch.full(shape, float(group)))) for name, shape in shapes]
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    idle = idle_sgd([parameter for _, parameter in named])
    optimizer = hvd.DistributedOptimizer(idle, named, algorithm=algorithm)
    found = np.empty((rounds + 1, INTERVAL))
    for index in range(found.size):
        participants.barrier()
        begin = time.perf_counter()
        optimizer.step()
        found.flat[index] = time.perf_counter() - begin
    mean = (participants.size // members - 1) / 2
    wrong = any(bool((parameter != mean).any()) for _, parameter in named)
    right = bool(participants.maximum(np.array([float(wrong)]))[0] == 0)
    return participants.maximum(found[1:].ravel()).reshape(rounds, INTERVAL), right


def by_turn(name: str, turns: Sequence[Seconds]) -> dict[str, list[float]]:
    """Return the median seconds in each turn of averaging gradients, and of averaging models."""
    if name == "synchronous":
        return {"gradients": [float(np.median(one)) for one in turns], "averaging": [0.0 for _ in turns]}
    return {
        "gradients": [float(np.median(one[:, 0])) for one in turns],
        "averaging": [float(np.median(one[:, 1] - one[:, 0])) for one in turns],
    }


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Time every contestant in turns. Collective."""
    shapes = SETS[chosen.set]()
    count = 4 * sum(int(np.prod(shape)) for _, shape in shapes)
    nodes = plan.nodes_of_ranks()
    rates, _ = plan.measure(count, chosen.budget)
    names, sizes = [name for name, _ in shapes], [4 * int(np.prod(shape)) for _, shape in shapes]
    algorithms = contestants(chosen.members)
    seconds: dict[str, list[Seconds]] = {name: [] for name in algorithms}
    entries: dict[str, Results] = {}
    for _ in range(chosen.turns):
        for name, algorithm in algorithms.items():
            sent = hvd.stats()["bytes_sent_across_nodes"]
            found, right = times(algorithm, shapes, participants, chosen.rounds)
            sent = hvd.stats()["bytes_sent_across_nodes"] - sent
            seconds[name].append(found)
            entry = entries.setdefault(name, {"right": True, "sent": sent / (INTERVAL * (chosen.rounds + 1))})
            entry["right"] &= right
    for name, algorithm in algorithms.items():
        steps = np.concatenate(seconds[name])
        phases = plan.cost_of(algorithm, nodes, names, sizes).phases
        averaging = sum(phase.load.seconds(rates) for phase in phases if phase.every > 1)
        gradients = sum(phase.load.seconds(rates) for phase in phases if phase.every == 1)
        entries[name]["gradients"] = summarize(steps if name == "synchronous" else steps[:, 0])
        entries[name]["averaging"] = None if name == "synchronous" else summarize(steps[:, 1] - steps[:, 0])
        entries[name]["by_turn"] = by_turn(name, seconds[name])
        entries[name]["predicted"] = {"gradients": gradients, "averaging": averaging}
    return {
        "set": chosen.set,
        "parameters": count // 4,
        "members": chosen.members,
        "groups": participants.size // chosen.members,
        "rates": rates.as_results(),
        "contestants": entries,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="local_sgd_worker", description=__doc__)
    options.add_argument("--set", choices=SETS, required=True)
    options.add_argument("--members", type=int, required=True, metavar="K")
    options.add_argument("--turns", type=int, required=True, metavar="N")
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    options.add_argument("--budget", type=float, required=True, metavar="S", help="to measure the links")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
