"""One rank of Figure 9: training with one algorithm over slow links, with a sleep as computation.

Rank 0 prints its results as a line of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, Crossover, PushSum
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results
from sordino.timing import Participants, race

GROUP = 2
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "allreduce": AllReduce,
    "push-sum": PushSum,
    "crossover": Crossover,
    "crossover, one segment": lambda: Crossover(segments="model"),
    "hierarchical": lambda: Crossover(group_size=GROUP),
}
LEARNING_RATE = 1e-4
_NARROW = 4  # divisor of ResNet-50's numbers of channels
_FORWARD = 1 / 3  # share of the computation
_STEPS = 3  # measured steps of each length, after one step of warm-up


def narrow_resnet50() -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of ResNet-50's parameters with a quarter of the channels: 1.6 M parameters."""
    return [
        (name, tuple(max(1, length // _NARROW) if axis < 2 else length for axis, length in enumerate(shape)))
        for name, shape in resnet50_shapes()
    ]


class Training:
    """Training with real parameters, gradients and steps. Computation is a sleep, because the hosts share cores.

    A third of the sleep is in forward. The rest is divided among the gradients of weights, which backward makes one by
    one, from the last layer to the first. Every element of every gradient is `value`.
    """

    def __init__(self, algorithm: Algorithm, value: float) -> None:
        named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in narrow_resnet50()]
        self.parameters = [parameter for _, parameter in named]
        sgd = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)
        self.optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm)
        self.value, self.seconds, self.done = value, 0.0, 0
        self._heavy = sum(parameter.dim() > 1 for parameter in self.parameters)

    def step(self) -> None:
        """Take a step that computes for `seconds`."""
        self.optimizer.zero_grad(set_to_none=False)
        self._forward().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.done += 1

    def _forward(self) -> torch.Tensor:
        time.sleep(self.seconds * _FORWARD)
        share = self.seconds * (1 - _FORWARD) / self._heavy
        signal = torch.ones((), requires_grad=True)
        for parameter in self.parameters:
            signal = signal + self.value * parameter.sum()
            if parameter.dim() > 1:
                signal.register_hook(lambda _: time.sleep(share))  # type: ignore[no-untyped-call]
        return signal

    def is_right(self, participants: Participants) -> bool:
        """Return whether the mean model is the result of steps with the mean gradient, as it must be. Collective."""
        expected = -LEARNING_RATE * self.done * (participants.size + 1) / 2
        means = [
            float(hvd.allreduce(p.detach(), name="claim.mean").mean())
            for p in self.parameters[:: len(self.parameters) - 1]
        ]
        wrong = not np.allclose(means, expected, rtol=1e-3)
        return bool(participants.maximum(np.array([float(wrong)]))[0] == 0)


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Time steps with every length of computation. Collective."""
    training = Training(ALGORITHMS[chosen.by](), participants.rank + 1.0)
    seconds = {}
    for compute_ms in chosen.compute_ms:
        training.seconds = compute_ms / 1e3
        found = race({"it": training.step}, participants, 0.0, rounds=_STEPS, warmup=1, least_rounds=_STEPS)["it"]
        seconds[f"{compute_ms:g}"] = float(np.median(found.seconds))
    payload = hvd.stats()["bytes_sent_across_nodes"] / training.done
    sent = float(hvd.allreduce(torch.tensor([payload], dtype=torch.float64), name="claim.sent"))
    size = 4 * sum(parameter.numel() for parameter in training.parameters)
    return {"seconds": seconds, "sent": sent, "bytes": size, "right": training.is_right(participants)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="figure_9_worker", description=__doc__)
    options.add_argument("--by", choices=ALGORITHMS, required=True, help="the algorithm")
    options.add_argument("--compute-ms", type=float, nargs="+", required=True, metavar="MS")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
