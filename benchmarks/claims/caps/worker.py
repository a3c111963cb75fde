"""One rank of Figure 9's job: real training over slow links, and the time that steps wait for communication.

Started by `measure`. Hosts share the cores, so ranks finish backward at different times. They meet in a barrier before
the step, and the wait there is not counted. AllReduce communicates during backward, so its ranks meet before backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from claims.caps.networks import Dropout, make_network
from claims.caps.training import BATCH, RATES, WORKERS, all_equal
from claims.training import load
from cluster import jobs
from sordino.algorithms import Algorithm, AllReduce, CaPS
from sordino.algorithms.caps import Detection
from sordino.report import Results
from sordino.timing import Participants, rotated

BASELINE, UNSKIPPED = "AllReduce", "unskipped"
SKIPPING: tuple[Detection, ...] = ("naive", "random", "history")


def contestants() -> dict[str, Algorithm]:
    """Return all-reduce, averaging without skipping, and skipping with each of the source's detectors."""
    skipping: dict[str, Algorithm] = {name: CaPS(name) for name in SKIPPING}
    return {BASELINE: AllReduce(), UNSKIPPED: CaPS(threshold=101.0), **skipping}


class Training:
    """This rank's network, which is trained epoch by epoch."""

    def __init__(self, algorithm: Algorithm, chosen: argparse.Namespace) -> None:
        self._images, self._labels = load(chosen.data, chosen.images, 0)["train"]
        self._seed, self._epoch = chosen.seed, 0
        self.model = make_network("convolutional", self._images.shape[2], chosen.seed)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.begin(chosen.seed * WORKERS + hvd.rank())
        sgd = torch.optim.SGD(self.model.parameters(), lr=RATES["momentum"], momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, self.model.named_parameters(), algorithm=algorithm)
        self._early = isinstance(algorithm, AllReduce)

    def epoch(self, participants: Participants) -> Results:
        """Train for an epoch; return the slowest rank's wait in ms and the bytes sent, per step. Collective."""
        order = np.random.Generator(np.random.PCG64((self._seed, self._epoch))).permutation(len(self._labels))
        self._epoch += 1
        exposed, sent = [], 0.0
        whole = hvd.size() * BATCH
        for first in range(hvd.rank() * BATCH, len(order) // whole * whole, whole):
            mine = torch.from_numpy(order[first : first + BATCH])
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self._images[mine]), self._labels[mine])
            if not self._early:
                loss.backward()
            participants.barrier()
            before = hvd.stats()
            if self._early:
                loss.backward()
            self.optimizer.step()
            after = hvd.stats()
            exposed.append(after["exposed_seconds"] - before["exposed_seconds"])
            sent += after["bytes_sent"] - before["bytes_sent"]
        slowest = participants.maximum(np.array(exposed))
        mean = hvd.allreduce(torch.tensor([sent], dtype=torch.float64), name="claims.sent")
        return {"ms": 1000 * float(slowest.mean()), "bytes": float(mean) / len(exposed)}


def run(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Train all contestants, epoch by epoch in turns. Collective."""
    trainings = {name: Training(one, chosen) for name, one in contestants().items()}
    found: dict[str, list[Results]] = {name: [] for name in trainings}
    for number in range(chosen.epochs):
        for name in rotated(trainings, number):
            found[name].append(trainings[name].epoch(participants))
    for one in trainings.values():
        one.optimizer.flush()
    return {"epochs": found, "equal": all(all_equal(one.model) for one in trainings.values())}


def measure(seed: int, epochs: int, data: str, images: int, hosts: int, mbps: float) -> Results:
    """Run a job of four ranks on emulated hosts with links of `mbps` Mbps, or on this machine if `hosts` is 0.

    Returns:
        For each contestant the wait in ms and the bytes sent per step, epoch by epoch; and whether all ranks ended with
        equal parameters.
    """
    settings = {"seed": seed, "epochs": epochs, "data": data, "images": images}
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    module = "claims.caps.worker"
    if hosts == 0:
        found = jobs.run_here(WORKERS, module, words, "local")
    else:
        found = jobs.run_on_hosts(hosts, WORKERS // hosts, mbps, module, words)
    return {"epochs": found["epochs"], "equal": found["equal"]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="worker", description=__doc__)
    options.add_argument("--seed", type=int, required=True, metavar="N")
    options.add_argument("--epochs", type=int, required=True, metavar="N")
    options.add_argument("--data", required=True)
    options.add_argument("--images", type=int, required=True, metavar="N")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: run(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
