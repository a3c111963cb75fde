"""What DistributedOptimizer adds to a training step on one GPU with one rank: nothing is averaged, all is cost.

  python benchmarks/gpu_step.py

  ResNet-50    forward, backward and step of a ResNet-50 on random images, bfloat16 autocast, channels_last
  parameters   its 161 parameters with gradients that are made in backward and no computation, so nothing hides the host

SGD with momentum, by itself and wrapped, with gradients set to None or to zero between steps. Contestants take turns; a
turn is some steps between two synchronizations, timed by the host's clock and between events of the device.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from gpu.step_report import REPORTS
from gpu_kernels import check_device
from sordino._core import build_info
from sordino.bench import command_line
from sordino.bench.resnet import Model, Work
from sordino.report import Results, machines, records, verdicts
from sordino.timing import Participants, Run, Samples, Watch, summarize

LIMIT = 2.0  # percent of a step of ResNet-50
_ROUNDS = 30


# ---- models ----------------------------------------------------------------------------------------------------------


class _Bottleneck(nn.Module):
    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or into != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(into, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.bn1(self.conv1(x)))
        found = torch.relu(self.bn2(self.conv2(found)))
        return torch.relu(self.bn3(self.conv3(found)) + self.downsample(x))


class ResNet50(nn.Module):
    """He et al. 2016, with the names that everybody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        into = 64
        for stage, (blocks, width) in enumerate(zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True), start=1):
            layers = []
            for block in range(blocks):
                layers.append(_Bottleneck(into, width, 2 if block == 0 and stage > 1 else 1))
                into = 4 * width
            self.add_module(f"layer{stage}", nn.Sequential(*layers))
        self.fc = nn.Linear(into, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        found: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return found


class _Layer(torch.autograd.Function):
    """Passes a signal through; its backward makes a gradient of the parameter's size."""

    @staticmethod
    def forward(ctx: Any, signal: torch.Tensor, parameter: torch.Tensor) -> Any:
        ctx.save_for_backward(parameter)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (parameter,) = ctx.saved_tensors
        return grads[0], torch.full_like(parameter, 1e-3)


class Parameters(Model):
    """ResNet-50's parameters without computation."""

    def __init__(self) -> None:
        super().__init__(Work(), 0, 1e-3)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters():
            signal = _Layer.apply(signal, parameter)  # type: ignore[no-untyped-call]
        return signal


@dataclass(frozen=True)
class Case:
    """What is trained, on which inputs, and how its loss is computed."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[torch.device], torch.Tensor]
    autocast: bool


def cases(batch: int) -> list[Case]:
    """Both kinds of step."""

    def images(place: torch.device) -> torch.Tensor:
        return torch.randn(batch, 3, 224, 224, device=place).contiguous(memory_format=torch.channels_last)

    return [
        Case("ResNet-50", ResNet50, images, True),
        Case("parameters", Parameters, lambda place: torch.ones(1, device=place, requires_grad=True), False),
    ]


# ---- measuring -------------------------------------------------------------------------------------------------------


def stepper(case: Case, place: torch.device, wrapped: bool, set_to_none: bool) -> Run:
    """One training step of a model of its own."""
    torch.manual_seed(0)
    model, inputs = case.model().to(place), case.inputs(place)
    for parameter in model.parameters():
        if parameter.dim() == 4 and case.autocast:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast(place.type, torch.bfloat16, enabled=case.autocast):
            loss = model(inputs).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


@dataclass
class Times:
    """Of one contestant, by both clocks."""

    wall: Samples = field(default_factory=Samples)
    device: Samples = field(default_factory=Samples)

    def summary(self) -> Results:
        return {"wall": self.wall.summary(), "device": self.device.summary()}


def race(contestants: Mapping[str, Run], place: torch.device, budget: float, rounds: int = _ROUNDS) -> dict[str, Times]:
    """Times them in turns, by both clocks; on the CPU they are one."""
    on_gpu = place.type == "cuda"
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else (None, None)

    def turn(name: str, count: int) -> tuple[float, float]:
        if begin is None or end is None:
            start = time.perf_counter()
            for _ in range(count):
                contestants[name]()
            seconds = (time.perf_counter() - start) / count
            return seconds, seconds
        torch.cuda.synchronize()
        start = time.perf_counter()
        begin.record()
        for _ in range(count):
            contestants[name]()
        end.record()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count, float(begin.elapsed_time(end)) * 1e-3 / count

    names = list(contestants)
    share = budget / rounds / len(names)
    for name in names:
        turn(name, 3)  # convolutions choose their algorithms
    counts = {name: int(np.clip(share / max(turn(name, 2)[0], 1e-6), 2, 200)) for name in names}
    times = {name: Times() for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, device = turn(name, counts[name])
            times[name].wall.rounds.append(np.array([wall]))
            times[name].device.rounds.append(np.array([device]))
    return times


def overhead(times: Mapping[str, Times], clock: str) -> dict[str, float]:
    """Round by round, in percent of the bare optimizer's step."""
    bare, wrapped = (getattr(times[name], clock).round_medians for name in ("bare", "sordino"))
    return summarize(100 * (wrapped - bare) / bare)


def measure(case: Case, place: torch.device, set_to_none: bool, budget: float, rounds: int = _ROUNDS) -> Results:
    """One row: the same step with the bare optimizer and with the wrapped one."""
    runs = {name: stepper(case, place, name == "sordino", set_to_none) for name in ("bare", "sordino")}
    times = race(runs, place, budget, rounds)
    return {
        "case": case.name,
        "set_to_none": set_to_none,
        "contestants": {name: one.summary() for name, one in times.items()},
        "overhead": {clock: overhead(times, clock) for clock in ("wall", "device")},
    }


def targets(rows: Sequence[Results]) -> list[Results]:
    """What ResNet-50's step may cost more, by the host's clock."""
    return [
        verdicts.target(
            f"{row['case']}, set_to_none={row['set_to_none']}: overhead in percent of the step",
            row["overhead"]["wall"]["median"],
            LIMIT,
            at_least=False,
        )
        for row in rows
        if row["case"] == "ResNet-50"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark in this process. NotBuilt where there is no GPU."""
    options = command_line.parser("gpu_step", __doc__, 20.0, "kind of step")
    options.add_argument("--batch", type=int, default=64, metavar="N", help="images in a step (default 64)")
    chosen = options.parse_args(argv)
    check_device("gpu_step")
    found_machine, watch = machines.machine(None), Watch(Participants())
    hvd.init()
    place = torch.device("cuda", torch.cuda.current_device())
    rows = []
    for case in cases(chosen.batch):
        for set_to_none in (True, False):
            rows.append(measure(case, place, set_to_none, 3.0 if chosen.quick else chosen.budget))
            median = rows[-1]["overhead"]["wall"]["median"]
            records.log(f"{case.name}, set_to_none={set_to_none}: {median:.2f} % more")
            torch.cuda.empty_cache()
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "gpu_step",
        "name": "gpu_step",
        "machine": found_machine,
        "device": torch.cuda.get_device_name(),
        "cuda": build_info()["cuda"],
        "batch": chosen.batch,
        "rows": rows,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
