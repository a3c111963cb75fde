"""Training whose ranks are killed and replaced in the running job again and again, compared with one without kills.

  python benchmarks/soak_joins.py                20 minutes, a kill every 20 s, 4 ranks

Trains on Fashion-MNIST with `hvd.elastic.run` under `sordino run --respawn`. Each epoch visits every image once,
however many ranks there are, so the same number of epochs is the same work. Each step also sleeps, as if a GPU
computed, so that new processes find free cores to start on. An undisturbed trial gives the time of an epoch; the
goodput is the time that all epochs would take undisturbed, divided by the time that they take with kills. Another
undisturbed training, without sleep, gives the accuracy to compare with. Exit status 0 if all targets are met, 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import sordino.torch as hvd
from cluster import jobs
from drills.job import Job
from sordino.bench import command_line
from sordino.data import load_digits, load_fashion_mnist
from sordino.errors import SordinoError
from sordino.report import Results, machines, records, verdicts
from sordino.runtime.context import current
from sordino.timing import summarize
from timings.soak_joins import REPORTS

_TRIAL_EPOCHS = 4
_BATCH = 32  # per rank
_BUSY_S = 0.03  # sleep in each step
_STUCK_S = 120.0
_POINTS = 1.0


def work(folder: Path, data_set: str, epochs: int, busy: float) -> None:
    """Train as one rank, with a line per step in a file of its own. Rank 0 also writes the results."""
    torch.set_num_threads(1)
    hvd.init(on_peer_lost="continue")
    data = load_fashion_mnist() if data_set == "fashion-mnist" else load_digits()
    images, labels = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    sampler = hvd.elastic.ElasticSampler(TensorDataset(images, labels))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(data.image_size**2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    file = (folder / f"steps.{current().identity}").open("w", buffering=1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=_BATCH, sampler=sampler)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < epochs:
            for number, (inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                time.sleep(busy)
                sampler.record_batch(number, _BATCH)
                file.write(json.dumps([time.time(), hvd.size()]) + "\n")
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    with torch.no_grad():
        right = model(torch.from_numpy(data.test_images)).argmax(dim=1) == torch.from_numpy(data.test_labels)
    equal = hvd.consensus_distance(model) == 0
    if hvd.rank() == 0:
        (folder / "results.json").write_text(json.dumps({"accuracy": right.double().mean().item(), "equal": equal}))
    hvd.shutdown()


@dataclass(frozen=True)
class Steps:
    """Steps of one process: their times (Unix), and the number of ranks in each."""

    times: list[float]
    sizes: list[int]

    @classmethod
    def read(cls, path: Path) -> Steps:
        """Read a file of `work`. Its last line may be cut off."""
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return cls([at for at, _ in lines], [size for _, size in lines])


def _steps(folder: Path) -> dict[int, Steps]:
    """Return the steps of each process that has taken any, by the process's number in the job."""
    found = {int(path.suffix[1:]): Steps.read(path) for path in folder.glob("steps.*")}
    return {number: steps for number, steps in found.items() if steps.times}


@dataclass(frozen=True)
class Plan:
    """Settings of the training and of its kills."""

    data: str
    ranks: int
    every: float
    seed: int

    def words(self, folder: Path, epochs: int, busy: float, *how: str) -> list[str]:
        """Return the words of `sordino run` for a training that writes its files to `folder`."""
        words = ["-np", str(self.ranks), *how, "--", sys.executable, str(Path(__file__).resolve()), "--data", self.data]
        return [*words, "--work", str(folder), "--epochs", str(epochs), "--busy", str(busy)]


def undisturbed(plan: Plan, folder: Path, epochs: int, busy: float) -> Results:
    """Train without kills. Return the accuracy and the seconds per epoch."""
    folder.mkdir()
    with Job(folder / "job", plan.words(folder, epochs, busy)) as job:
        status = job.wait(time.time() + 3600)
    if status != 0:
        raise SordinoError(f"the undisturbed training ended with status {status}:\n{job.output[-2000:]}")
    times = _steps(folder)[0].times
    per_step = (times[-1] - times[0]) / (len(times) - 1)
    found = json.loads((folder / "results.json").read_text())
    return {"accuracy": found["accuracy"], "epoch_seconds": per_step * len(times) / epochs}


def disturbed(plan: Plan, folder: Path, epochs: int) -> Results:
    """Train while ranks are killed and replaced. Return the results and the effects of the kills."""
    folder.mkdir()
    generator, kills = random.Random(plan.seed), list[float]()
    with Job(folder / "job", plan.words(folder, epochs, _BUSY_S, "--respawn", "1000")) as job:
        at, status = float("inf"), None
        while status is None:
            status = job.wait(min(at, time.time() + 1))
            steps = _steps(folder)
            if at == float("inf") and len(steps) == plan.ranks:  # all have begun
                at = time.time() + plan.every
            latest = max((one.times[-1] for one in steps.values()), default=job.begun)
            if status is None and time.time() - latest > _STUCK_S:
                raise job.stuck(f"the job has taken no step for {_STUCK_S:.0f} s")
            if status is None and time.time() >= at:
                alive = job.ranks()
                if len(alive.keys() & steps.keys()) > 1:  # a rank that has the state remains
                    kill = job.kill(alive, [generator.choice(sorted(alive))])
                    kills.append(kill.time)
                    records.log(f"{kill.time - job.begun:.0f} s: killed process {kill.ranks[0]} of {kill.alive}")
                at = time.time() + plan.every * generator.uniform(0.5, 1.5)
        seconds, output, left = time.time() - job.begun, job.output, job.left()
    steps = _steps(folder)
    times = sorted(at for one in steps.values() for at in one.times)
    if not times:
        raise SordinoError(
            f"the training with kills ended with status {status} before its first step:\n{output[-2000:]}"
        )
    back = [
        one.times[0] - max(kill for kill in kills if kill < one.times[0])
        for number, one in steps.items()
        if number >= plan.ranks
    ]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    found: Results = {
        "status": status,
        "seconds": seconds,
        "training_seconds": times[-1] - times[0],
        "kills": len(kills),
        "replaced": len(back),
        "back": summarize(np.array(back)) if back else None,
        "longest_stop": max(gaps),
        "left": [machines.without_paths(one) for one in left],
    }
    if status == 0:
        found |= json.loads((folder / "results.json").read_text())
    else:
        found["output"] = machines.without_paths(output[-3000:])
    return found


def judged(trial: Results, calm: Results, stormy: Results, epochs: int) -> list[Results]:
    """Return the targets."""
    target, ended = verdicts.target, stormy["status"] == 0
    goodput = trial["epoch_seconds"] * epochs / stormy["training_seconds"] if ended else None
    points = 100 * abs(stormy["accuracy"] - calm["accuracy"]) if ended else None
    return [
        target("goodput, as a share of the undisturbed training's", goodput, 0.9, True),
        target("points of accuracy from the undisturbed run", points, _POINTS, False),
        target("exit status", stormy["status"], 0, False),
        target("models that differ at the end", int(not stormy.get("equal", False)), 0, False),
        target("kills without a replacement that trained", stormy["kills"] - stormy["replaced"], 1, False),
        target("processes and files left behind", len(stormy["left"]), 0, False),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one of its ranks."""
    parser = argparse.ArgumentParser(
        prog="soak_joins", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results)")
    add("--quick", action="store_true", help="2 minutes, unless told; writes nothing unless --results says where")
    add("--minutes", type=float, metavar="M", help="duration of the training with kills (default 20; 2 if --quick)")
    add("--every", type=float, default=20.0, metavar="S", help="seconds from kill to kill, on average (default 20)")
    add("--ranks", type=int, default=4, metavar="N", help="(default 4)")
    add("--seed", type=int, default=1, help="of the kills (default 1)")
    add("--data", choices=("fashion-mnist", "digits"), default="fashion-mnist", help="(default fashion-mnist)")
    add("--work", type=Path, help=argparse.SUPPRESS)
    add("--epochs", type=int, help=argparse.SUPPRESS)
    add("--busy", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work is not None:
        work(options.work, options.data, options.epochs, options.busy)
        return 0
    plan = Plan(options.data, options.ranks, options.every, options.seed)
    minutes = options.minutes or (2.0 if options.quick else 20.0)
    machine = jobs.machine_before()
    try:
        with tempfile.TemporaryDirectory(prefix="soak-joins-") as path:
            folder = Path(path)
            trial = undisturbed(plan, folder / "trial", _TRIAL_EPOCHS, _BUSY_S)
            epochs = max(_TRIAL_EPOCHS, round(60 * minutes / trial["epoch_seconds"]))
            records.log(f"{trial['epoch_seconds']:.1f} s per epoch; {epochs} epochs")
            calm = undisturbed(plan, folder / "calm", epochs, 0.0)
            records.log(f"{calm['accuracy']:.2%} without kills")
            stormy = disturbed(plan, folder / "stormy", epochs)
    except SordinoError as error:
        return jobs.failed("soak_joins", error)
    results: Results = {
        "benchmark": "soak_joins",
        "name": "soak_joins",
        "machine": machine,
        **vars(plan),
        "epochs": epochs,
        "epoch_seconds": trial["epoch_seconds"],
        "accuracy": calm["accuracy"],
        "disturbed": stormy,
        "targets": judged(trial, calm, stormy, epochs),
    }
    records.publish(results, command_line.results_folder(options), REPORTS)
    return 0 if all(one["met"] for one in results["targets"]) else 1


if __name__ == "__main__":
    sys.exit(main())
