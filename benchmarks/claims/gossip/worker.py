"""One rank of the gossip benchmark over slow links: trains by each algorithm in turn, its computation a sleep.

Started by claims.gossip.cluster in a cluster of emulated hosts; rank 0 prints what it found as a line of JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, Crossover, PushSum
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results
from sordino.timing import Participants, Watch, race

GROUP = 2
LEARNING_RATE = 1e-4
_FORWARD = 1 / 3  # of the computation


def algorithms(size: int) -> dict[str, Algorithm]:
    """The contestants among this many workers."""
    if size == 1:
        return {"alone": AllReduce()}
    found: dict[str, Algorithm] = {
        "allreduce": AllReduce(),
        "allreduce_after": AllReduce(bucket_bytes=1 << 40),
        "pushsum": PushSum(),
        "pushsum_overlap": PushSum(overlap=1),
        "crossover": Crossover(),
    }
    # Groups of all workers are AllReduce.
    return found | ({"hierarchical": Crossover(group_size=GROUP)} if size > GROUP and size % GROUP == 0 else {})


def half_resnet50() -> list[tuple[str, tuple[int, ...]]]:
    """ResNet-50's parameters with half as many channels everywhere: a quarter of the bytes."""
    return [
        (name, tuple(max(1, length // 2) if axis < 2 else length for axis, length in enumerate(shape)))
        for name, shape in resnet50_shapes()
    ]


@dataclass
class Surroundings:
    """What all trainings of a rank share.

    Attributes:
        seconds: that a step computes.
    """

    seconds: float = 0.0
    _sent: tuple[int, int] = (0, 0)
    _training: Training | None = None

    def enter(self, training: Training | None) -> None:
        """Counts what was sent since the last call as the last training's. To be called when all ranks have ended
        their turns: what a rank sends may leave its host later than its step ends."""
        now = link_bytes(), int(hvd.stats()["bytes_sent_across_nodes"])
        if self._training is not None:
            self._training.link_bytes += now[0] - self._sent[0]
            self._training.payload_bytes += now[1] - self._sent[1]
        self._training, self._sent = training, now


class Training:
    """Real parameters, gradients and steps; the computation sleeps, so that hosts which share cores do not share it.

    A third of the sleep is in forward; the rest is spread over the gradients of weights, which backward makes one by
    one, the last layer's first. Every element of every gradient is `value`.
    """

    def __init__(self, algorithm: Algorithm, around: Surroundings, value: float, steps: int) -> None:
        named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in half_resnet50()]
        self.parameters = [parameter for _, parameter in named]
        sgd = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)
        self.optimizer = hvd.DistributedOptimizer(sgd, named, algorithm=algorithm)
        self.around, self.value, self.steps = around, value, steps
        self.done = 0
        self.link_bytes = self.payload_bytes = 0
        self._heavy = sum(parameter.dim() > 1 for parameter in self.parameters)

    def run(self) -> None:
        """Takes `steps` steps."""
        self.around.enter(self)
        for _ in range(self.steps):
            self.optimizer.zero_grad(set_to_none=False)
            self._forward().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        self.done += self.steps

    @contextmanager
    def turn(self) -> Iterator[None]:
        """After it nothing is under way any more that would slow down the others. Collective."""
        yield
        self.optimizer.flush()

    def _forward(self) -> torch.Tensor:
        time.sleep(self.around.seconds * _FORWARD)
        share = self.around.seconds * (1 - _FORWARD) / self._heavy
        signal = torch.ones((), requires_grad=True)
        for parameter in self.parameters:
            signal = signal + self.value * parameter.sum()
            if parameter.dim() > 1:
                signal.register_hook(lambda _: time.sleep(share))  # type: ignore[no-untyped-call]
        return signal

    def is_right(self, participants: Participants) -> bool:
        """Whether the workers' mean is where their mean gradient leads, as every one of the algorithms keeps it.
        Collective."""
        expected = -LEARNING_RATE * self.done * (participants.size + 1) / 2
        means = [
            float(hvd.allreduce(p.detach(), name="bench.mean").mean())
            for p in self.parameters[:: len(self.parameters) - 1]
        ]
        wrong = not np.allclose(means, expected, rtol=1e-3)
        return bool(participants.maximum(np.array([float(wrong)]))[0] == 0)


def link_bytes() -> int:
    """What this host has sent over its link so far, headers included; 0 where there is none."""
    for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def _busy(watch: Watch, begin: tuple[float, float]) -> float | None:
    """Cores that were busy, this process's included, since `watch` and `begin` (wall and CPU time)."""
    others = watch.others()
    wall, own = time.perf_counter() - begin[0], time.process_time() - begin[1]
    return None if others is None else round(others + own / wall, 2)


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Every algorithm at every length of computation. Collective."""
    around = Surroundings()
    trainings = {
        name: Training(algorithm, around, participants.rank + 1.0, chosen.steps)
        for name, algorithm in algorithms(participants.size).items()
    }
    runs = {name: one.run for name, one in trainings.items()}
    turns = {name: one.turn for name, one in trainings.items() if name == "pushsum_overlap"}
    rows = []
    for compute_ms in chosen.compute_ms:
        around.seconds = compute_ms / 1e3
        watch, begin = Watch(Participants()), (time.perf_counter(), time.process_time())
        samples = race(runs, participants, chosen.budget, rounds=10, warmup=1, least_rounds=3, turns=turns)
        row: Results = {"compute_ms": compute_ms, "busy_cores": _busy(watch, begin)}
        row["seconds"] = {name: [float(value) for value in one.seconds] for name, one in samples.items()}
        rows.append(row)
    participants.barrier()
    around.enter(None)
    traffic = {}
    for name, one in trainings.items():
        # The ranks of a host see the same link, and each its own payload.
        counters = torch.tensor([[float(one.link_bytes * (hvd.local_rank() == 0)), float(one.payload_bytes)]])
        table = hvd.allgather(counters, name="bench.traffic") / one.done
        hosts, most = hvd.cross_size(), float(table[:, 0].max())
        traffic[name] = {"link_mean": float(table[:, 0].sum()) / hosts, "link_most": most}
        traffic[name]["payload_mean"] = float(table[:, 1].sum()) / hosts
    right = {name: one.is_right(participants) for name, one in trainings.items()}
    parameters = sum(parameter.numel() for parameter in next(iter(trainings.values())).parameters)
    return {"rows": rows, "traffic": traffic, "right": right, "parameters": parameters}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs on all ranks."""
    options = argparse.ArgumentParser(prog="gossip_worker", description=__doc__)
    options.add_argument("--compute-ms", type=float, nargs="+", required=True, metavar="MS")
    options.add_argument("--budget", type=float, required=True, metavar="S")
    options.add_argument("--steps", type=int, required=True, metavar="N")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
