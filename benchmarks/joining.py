"""Time that a process takes to join a running job, and the delay of the job meanwhile.

  python benchmarks/joining.py

Two ranks average the gradients of a model with ResNet-50's parameters. One is killed, and `sordino run --respawn`
replaces it. In as many other jobs all ranks restart instead (`--restarts`). Times are medians over the jobs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sordino.torch as hvd
from cluster import jobs
from drills.job import Job
from sordino.bench import command_line
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import SordinoError
from sordino.report import Results, records, verdicts
from sordino.runtime.context import current
from sordino.timing import summarize
from timings.joining import REPORTS

_IMPORTED = time.time()
_STEPS_BEFORE, _STEPS_AFTER = 20, 40  # of each process before the kill, and of a new one after it
_QUICK_STEPS = 4, 6
_BUSY_S = 0.02  # sleep in each step


class Model(torch.nn.Module):
    """ResNet-50's parameters. Each parameter is its own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.zeros(shape) for _, shape in resnet50_shapes())

    def forward(self) -> torch.Tensor:
        loss = 0.5 * sum(one.square().sum() for one in self.all)
        return torch.as_tensor(loss)


def work(folder: Path) -> None:
    """Train as one rank until the folder has a file `over`, and write the times of the steps to a file."""
    torch.set_num_threads(1)
    hvd.init()
    me, ready = current().identity, time.time()
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, over=False)
    file = (folder / f"steps.{me}.{os.getpid()}").open("w", buffering=1)
    file.write(json.dumps({"imported": _IMPORTED, "ready": ready, "pid": os.getpid(), "rank": me}) + "\n")

    @hvd.elastic.run
    def train(state: Any) -> None:
        while not state.over:
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            time.sleep(_BUSY_S)
            state.step += 1
            over = torch.tensor(float((folder / "over").exists()))
            state.over = bool(hvd.allreduce(over, op=hvd.Max, name="over"))
            file.write(json.dumps([state.step, time.time(), hvd.size()]) + "\n")
            state.commit()

    train(state)
    hvd.shutdown()


def _read(folder: Path) -> list[tuple[dict[str, Any], list[list[float]]]]:
    """Return the head and the steps of each process, in the order of their starts."""
    found = []
    for path in folder.glob("steps.*"):
        lines = path.read_text().splitlines(keepends=True)
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        if whole:
            found.append((whole[0], whole[1:]))
    return sorted(found, key=lambda one: float(one[0]["imported"]))


def _wait(job: Job, done: Any) -> None:
    limit = time.time() + 120
    while not done():
        if time.time() > limit or job.wait(time.time() + 0.05) is not None:
            raise job.stuck("the job does not come to the expected step")


def measure(folder: Path, how: Sequence[str], respawn: bool, steps: tuple[int, int]) -> dict[str, float]:
    """Run one job, with these numbers of steps before and after the kill.

    Returns:
        Seconds to the newcomer's first step, and of the other rank's steps.
    """
    before, after = steps
    words = ["-np", "2", *how, "--", sys.executable, str(Path(__file__).resolve()), "--work", str(folder)]
    with Job(folder / "job", words) as job:
        _wait(job, lambda: len(_read(folder)) == 2 and all(len(steps) >= before for _, steps in _read(folder)))
        first, second = _read(folder)
        victim, survivor = (first, second) if first[0]["rank"] == 1 else (second, first)
        killed = time.time()
        os.kill(victim[0]["pid"], signal.SIGKILL)
        wanted = 3 if respawn else 4

        def back() -> bool:
            all_of_them = _read(folder)
            return len(all_of_them) == wanted and all(len(steps) > after for _, steps in all_of_them[2:])

        _wait(job, back)
        (folder / "over").touch()
        status = job.wait(time.time() + 60)
    if status != 0:
        raise SordinoError(f"the job ended with status {status}:\n{job.output[-2000:]}")
    newcomer, its_steps = _read(folder)[2]
    found = {
        "from_kill": its_steps[0][1] - killed,
        "from_import": its_steps[0][1] - newcomer["imported"],
    }
    if respawn:
        lines = next(lines for head, lines in _read(folder) if head["rank"] == survivor[0]["rank"])
        times = [at for _, at, _ in lines]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        joined = next(at for _, at, size in lines if size == 2 and at > killed + 0.5)
        found["step"] = sorted(gaps)[len(gaps) // 2]
        found["slowest_step"] = max(gap for gap, at in zip(gaps, times[1:]) if at >= joined - 1.0)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one of its ranks."""
    parser = argparse.ArgumentParser(
        prog="joining", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="one short job of each kind; writes only with --results")
    parser.add_argument("--jobs", type=int, default=7, metavar="N", help="jobs of each kind (default 7)")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work is not None:
        work(options.work)
        return 0
    machine = jobs.machine_before()
    found: dict[str, list[dict[str, float]]] = {"respawn": [], "restart": []}
    kinds = {
        "respawn": (["--respawn", "1"], True),
        "restart": (["--restarts", "1"], False),
    }
    steps = _QUICK_STEPS if options.quick else (_STEPS_BEFORE, _STEPS_AFTER)
    try:
        for _ in range(1 if options.quick else options.jobs):
            for kind, (how, respawn) in kinds.items():
                with tempfile.TemporaryDirectory(prefix="joining-") as folder:
                    found[kind].append(measure(Path(folder), how, respawn, steps))
                records.log(f"{kind}: {found[kind][-1]}")
    except SordinoError as error:
        return jobs.failed("joining", error)
    entries = {
        kind: {name: summarize(np.array([one[name] for one in those])) for name in those[0]}
        for kind, those in found.items()
    }
    results: Results = {
        "benchmark": "joining",
        "name": "joining",
        "machine": machine,
        "parameters": sum(torch.Size(shape).numel() for _, shape in resnet50_shapes()),
        "jobs": len(found["respawn"]),
        "kinds": entries,
        "targets": [
            verdicts.target(
                "seconds from the import of torch to the newcomer's first step",
                entries["respawn"]["from_import"]["median"],
                2.0,
                at_least=False,
            ),
        ],
    }
    records.publish(results, command_line.results_folder(options), REPORTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
