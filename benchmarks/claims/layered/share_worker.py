"""One rank of Figure 2's job: time of a step of AllReduce, with a sleep as computation.

Rank 0 prints the median seconds as a line of JSON. The gradients, of ResNet-50 with a quarter of the channels, exist
before the step, so nothing overlaps, as in the source.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import AllReduce
from sordino.bench.resnet import resnet50_shapes
from sordino.plan.links import idle_sgd
from sordino.report import Results
from sordino.timing import Participants

WAYS = {"in buckets": AllReduce(), "tensor by tensor": AllReduce(bucket_bytes=1)}
SHAPES = resnet50_shapes(4)
_WARM_UP = 2


def measure(compute_ms: float, rounds: int, participants: Participants) -> Results:
    """Time both ways in turns; return the slowest rank's seconds, and whether the averages are right. Collective."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    optimizers, right = {}, True
    for way, algorithm in WAYS.items():
        named = [(name, torch.nn.Parameter(torch.zeros(tuple(shape)))) for name, shape in SHAPES]
        for _, parameter in named:
            parameter.grad = torch.full_like(parameter, float(participants.rank))
        optimizers[way] = (
            hvd.DistributedOptimizer(idle_sgd([one for _, one in named]), named, algorithm=algorithm),
            named,
        )
    for number in range(_WARM_UP + rounds):
        for way, (optimizer, _) in optimizers.items():
            participants.barrier()
            begin = time.perf_counter()
            time.sleep(compute_ms / 1e3)
            optimizer.step()
            if number >= _WARM_UP:
                seconds[way].append(time.perf_counter() - begin)
    mean = (participants.size - 1) / 2
    for _, named in optimizers.values():
        right &= all(bool(torch.allclose(one.grad, torch.tensor(mean))) for _, one in named if one.grad is not None)
    wrong = participants.maximum(np.array([float(not right)]))[0]
    slowest = {way: participants.maximum(np.array(values)) for way, values in seconds.items()}
    return {"seconds": {way: float(np.median(values)) for way, values in slowest.items()}, "right": bool(wrong == 0)}


def main() -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="share_worker", description=__doc__)
    options.add_argument("--compute-ms", type=float, required=True, metavar="MS")
    options.add_argument("--rounds", type=int, required=True, metavar="N")
    chosen = options.parse_args()
    return jobs.work(lambda participants: measure(chosen.compute_ms, chosen.rounds, participants))


if __name__ == "__main__":
    raise SystemExit(main())
