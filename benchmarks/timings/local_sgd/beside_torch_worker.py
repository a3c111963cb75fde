"""One rank of the comparison with PyTorch's local SGD. Started by beside_torch.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from claims.local_sgd.worker import resnet20_shapes
from cluster import jobs
from sordino.algorithms import LocalSGD
from sordino.bench import baselines
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import NotBuilt
from sordino.report import Results
from sordino.timing import Participants, Run, race

INTERVAL = 4
SETS = {"resnet20": resnet20_shapes, "resnet50": resnet50_shapes}


class _Sums(torch.nn.Module):
    """Parameters, and a loss whose gradient is `value` in every element."""

    def __init__(self, shapes: Sequence[tuple[str, tuple[int, ...]]], value: float) -> None:
        super().__init__()
        self.value = value
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for _, shape in shapes)

    def forward(self) -> torch.Tensor:
        return self.value * torch.stack([weight.sum() for weight in self.weights]).sum()


def _ours(model: _Sums, algorithm: LocalSGD) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer]:
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)


def _theirs(model: _Sums, members: int, distributed: Any) -> tuple[Callable[[], torch.Tensor], torch.optim.Optimizer]:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    sgd = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(sgd, PeriodicModelAverager(period=INTERVAL, warmup_steps=0))
    if members == 1:
        return model, optimizer
    subgroup, _ = distributed.new_subgroups(members)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    # The hook averages over the subgroup in iterations after the start, here in all.
    state = PostLocalSGDState(process_group=None, subgroup=subgroup, start_localSGD_iter=-1)
    parallel.register_comm_hook(state, post_localSGD_hook)
    return parallel, optimizer


def _steps(forward: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Run:
    def run() -> None:
        for _ in range(INTERVAL):
            optimizer.zero_grad()
            forward().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def measure(chosen: argparse.Namespace, participants: Participants) -> Results:
    """Time every contestant. Collective."""
    found = baselines.open_all(["gloo"], participants)
    if found.gloo is None:
        raise NotBuilt(f"Gloo: {found.notes['gloo']}")
    shapes = SETS[chosen.set]()
    names = ("allreduce", "sharded", "torch") if chosen.members > 1 else ("allreduce", "torch")
    models = {name: _Sums(shapes, participants.rank + 1.0) for name in names}
    runs = {}
    for name, model in models.items():
        if name == "torch":
            runs[name] = _steps(*_theirs(model, chosen.members, found.gloo))
        else:
            runs[name] = _steps(*_ours(model, LocalSGD(INTERVAL, chosen.members, name)))  # type: ignore[arg-type]
        runs[name]()
    # All contestants had the same gradients, and averaging models does not change their mean.
    means = {name: hvd.allreduce(one.weights[0].detach(), name="bench.mean") for name, one in models.items()}
    wrong = [name for name, mean in means.items() if not torch.allclose(mean, means["torch"], rtol=1e-4)]
    samples = race(runs, participants, chosen.budget, rounds=15, warmup=2)
    theirs = samples["torch"].round_medians
    ratios = {name: float(np.median(theirs / samples[name].round_medians)) for name in names if name != "torch"}
    steps = {name: {key: value / INTERVAL for key, value in one.summary().items()} for name, one in samples.items()}
    found.close()
    count = sum(weight.numel() for weight in models["torch"].weights)
    return {
        "set": chosen.set,
        "members": chosen.members,
        "parameters": count,
        "contestants": {name: one | {"count": samples[name].summary()["count"]} for name, one in steps.items()},
        "ratios": ratios,
        "wrong": wrong,
        "notes": found.notes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run on all ranks."""
    options = argparse.ArgumentParser(prog="local_sgd_torch_worker", description=__doc__)
    options.add_argument("--set", choices=SETS, required=True)
    options.add_argument("--members", type=int, required=True, metavar="K")
    options.add_argument("--budget", type=float, required=True, metavar="S")
    chosen = options.parse_args(argv)
    return jobs.work(lambda participants: measure(chosen, participants))


if __name__ == "__main__":
    raise SystemExit(main())
