"""Overhead of DistributedOptimizer in a training step on a GPU, and the number of the host's waits for the GPU.

  sordino run -np 2 -- python benchmarks/gpu_step.py     # gradients are averaged
  python benchmarks/gpu_step.py                          # one rank averages nothing: pure overhead

  ResNet-50    forward, backward and step of a ResNet-50 on random images, bfloat16 autocast, channels_last
  parameters   its 161 parameters with gradients made in backward but no computation, so nothing hides the host's work

SGD with momentum, bare and wrapped, with gradients set to None or to zero between steps. Contestants take turns. A turn
is a number of steps between two synchronizations, timed by the host's clock and between CUDA events. The slowest rank
counts. Ranks that share a GPU take turns on it, also with the bare optimizer. A check before the timing shows that the
wrapped step averages and that the bare step does not. Finally a profiler counts the CUDA calls in which the host waits,
in steps of AllReduce, Crossover and LocalSGD.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from gpu import host_waits
from gpu import place as places
from gpu.models import Case, cases
from gpu.place import Place
from gpu.step_report import REPORTS
from sordino._core import build_info
from sordino.algorithms import Algorithm, AllReduce, Crossover, LocalSGD
from sordino.bench import baselines, command_line
from sordino.report import Results, machines, records, verdicts
from sordino.runtime.context import current
from sordino.timing import Participants, Run, Samples, Watch, rotated, summarize

LIMIT = 2.0  # percent of a step of ResNet-50 with one rank
WAITS_LIMIT = 0.0  # per step
_ROUNDS = 30
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "AllReduce": AllReduce,
    "Crossover": Crossover,
    "LocalSGD": lambda: LocalSGD(interval=4, exchange="allreduce"),
}


@dataclass
class Training:
    """A model, and a function that takes one step with it."""

    model: nn.Module
    step: Run


def training(case: Case, place: Place, algorithm: Algorithm | None, set_to_none: bool = True) -> Training:
    """Return a training by SGD with momentum: wrapped, or bare if `algorithm` is None."""
    torch.manual_seed(0)
    model = case.model().to(place.device)
    inputs = case.inputs(place.device)
    for parameter in model.parameters():
        if parameter.dim() == 4 and case.autocast:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    if algorithm is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(place.device.type, torch.bfloat16, enabled=case.autocast):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    return Training(model, step)


def averages(training: Training) -> tuple[bool, list[str]]:
    """Run a step; return whether all ranks then have the same gradients, and the routes it took. Collective."""
    before = dict(current().world.gpu_operations)
    training.step()
    ways = sorted(way for way, count in current().world.gpu_operations.items() if count > before.get(way, 0))
    flat = torch.cat([one.grad.flatten() for one in training.model.parameters() if one.grad is not None])
    least, most = (hvd.allreduce(flat, op=op, name=f"bench.{op}") for op in (hvd.Min, hvd.Max))
    return bool(torch.equal(least, most)), ways


@dataclass
class Times:
    """Times of one contestant by both clocks."""

    wall: Samples = field(default_factory=Samples)
    device: Samples = field(default_factory=Samples)

    def summary(self) -> Results:
        return {"wall": self.wall.summary(), "device": self.device.summary()}


def race(
    contestants: Mapping[str, Run], place: Place, participants: Participants, budget: float, rounds: int
) -> dict[str, Times]:
    """Time contestants in turns by both clocks. A turn begins with a barrier; the slowest rank counts. Collective."""

    def turn(name: str, count: int) -> tuple[float, float]:
        participants.barrier()
        wall, device = participants.maximum(np.array(place.turn(contestants[name], count)))
        return float(wall), float(device)

    names = list(contestants)
    share = budget / rounds / len(names)
    for name in names:
        turn(name, 3)  # warm-up, in which convolutions choose their algorithms
    counts = {name: int(np.clip(share / max(turn(name, 2)[0], 1e-6), 2, 200)) for name in names}
    times = {name: Times() for name in names}
    for number in range(rounds):
        for name in rotated(names, number):
            wall, device = turn(name, counts[name])
            times[name].wall.rounds.append(np.array([wall]))
            times[name].device.rounds.append(np.array([device]))
    return times


def overhead(times: Mapping[str, Times], clock: str) -> dict[str, float]:
    """Return the summary of the rounds' overheads, in percent of the bare optimizer's step."""
    bare, wrapped = (getattr(times[name], clock).round_medians for name in ("bare", "sordino"))
    return summarize(100 * (wrapped - bare) / bare)


def measure(
    case: Case, place: Place, participants: Participants, set_to_none: bool, budget: float, rounds: int = _ROUNDS
) -> Results:
    """Return one row: the step with the bare and the wrapped optimizer, and which of them average. Collective."""
    both = {
        "bare": training(case, place, None, set_to_none),
        "sordino": training(case, place, AllReduce(), set_to_none),
    }
    looked = {name: averages(one) for name, one in both.items()}
    times = race({name: one.step for name, one in both.items()}, place, participants, budget, rounds)
    return {
        "case": case.name,
        "set_to_none": set_to_none,
        "bytes": sum(4 * one.numel() for one in both["bare"].model.parameters()),
        "averaging": {name: same for name, (same, _) in looked.items()},
        "ways": looked["sordino"][1],
        "contestants": {name: one.summary() for name, one in times.items()},
        "overhead": {clock: overhead(times, clock) for clock in ("wall", "device")},
    }


def measure_waits(case: Case, place: Place, ranks: int, steps: int = host_waits.STEPS) -> dict[str, Results]:
    """Return the host's waits per step of each algorithm; and of a single wait, to test the profiler. Collective."""
    found = {"bare": host_waits.count(training(case, place, None).step, place, steps)}
    for name, make in ALGORITHMS.items():
        if ranks > 1 or name == "AllReduce":
            found[name] = host_waits.count(training(case, place, make()).step, place, steps)
    found["one wait"] = host_waits.count(place.finish, place, steps)
    return found


def wrong(rows: Sequence[Results], waits: Mapping[str, Results], ranks: int, on_gpu: bool) -> list[str]:
    """Return the steps that average and should not, or should and do not; and whether the profiler sees no wait."""
    blind = ["the profiler does not see the host wait"] if on_gpu and waits["one wait"]["total"] < 1 else []
    return blind + [
        f"{name} step of {row['case']} (set_to_none={row['set_to_none']}) {'averages' if got else 'does not average'}"
        for row in rows
        for name, got in row["averaging"].items()
        if ranks > 1 and got != (name == "sordino")
    ]


def targets(rows: Sequence[Results], waits: Mapping[str, Results], ranks: int) -> list[Results]:
    """Return the targets: overhead of ResNet-50's step with one rank by the host's clock, and waits of the host."""
    entries = [
        verdicts.target(
            f"{row['case']}, set_to_none={row['set_to_none']}: overhead in percent of the step",
            row["overhead"]["wall"]["median"],
            LIMIT,
            at_least=False,
        )
        for row in rows
        if row["case"] == "ResNet-50" and ranks == 1
    ]
    return entries + [
        verdicts.target(f"{name}: waits of the host in a step", waits[name]["total"], WAITS_LIMIT, at_least=False)
        for name in ALGORITHMS
        if name in waits
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks. Status 1 if a step averages wrongly. NotBuilt without a GPU."""
    options = command_line.parser("gpu_step", __doc__, 5.0, "kind of step")
    options.add_argument("--batch", type=int, default=64, metavar="N", help="images per step (default 64)")
    places.add_option(options)
    chosen = options.parse_args(argv)
    places.find("gpu_step", chosen.pretend)
    participants, library = baselines.start()
    place = places.find("gpu_step", chosen.pretend, hvd.local_rank())
    places.enter(place)
    found_machine, watch = machines.machine(library), Watch(participants)
    rounds, steps, kinds = _ROUNDS, host_waits.STEPS, cases(chosen.batch)
    budget = 2.0 if chosen.quick else chosen.budget
    if chosen.pretend:
        chosen.quick, chosen.batch, rounds, steps, budget, kinds = True, 2, 2, 2, 0.0, cases(2, 32, 16)
    rows = []
    for case in kinds:
        for set_to_none in (True, False):
            rows.append(measure(case, place, participants, set_to_none, budget, rounds))
            median = rows[-1]["overhead"]["wall"]["median"]
            if participants.rank == 0:
                records.log(f"{case.name}, set_to_none={set_to_none}: overhead {median:.2f} %")
            if place.on_gpu:
                torch.cuda.empty_cache()
    waits = measure_waits(kinds[0], place, participants.size, steps)
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "gpu_step",
        "name": f"gpu_step_np{participants.size}",
        "machine": found_machine,
        "device": place.name,
        "gpus": min(torch.cuda.device_count(), participants.size) if place.on_gpu else 1,
        "cuda": build_info()["cuda"],
        "ranks": participants.size,
        "batch": chosen.batch,
        "rows": rows,
        "waits": waits,
        "wrong": wrong(rows, waits, participants.size, place.on_gpu),
        "targets": [] if chosen.pretend else targets(rows, waits, participants.size),
    }
    if participants.rank == 0:
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    hvd.shutdown()
    return 1 if results["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
