"""Accuracy and distance against the number of local models: Table I and Figure 4 of hierarchical local SGD, in small.

  python benchmarks/local_sgd.py accuracy

Trains a network of three linear layers on Fashion-MNIST by P local models of one rank each (threads), for a fixed
number of epochs: mini-batches of 128 a rank, models averaged every 8 steps, the learning rate that of one worker times
P (the linear rule) or its square root, after a gradual warm-up. The rate of one worker is the one of a grid that suits
it best on images held out of training. The rule for P (`sordino.plan.find_workers`) is tried on the same network and
images, for a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

from claims.accuracy.training import INTERVAL, WARM_UP, Task, Training, load, make_model, train
from claims.local_sgd.report import REPORTS
from sordino import plan
from sordino.bench import command_line
from sordino.report import Results, machines, records
from sordino.torch.schedules import scale_learning_rate

BATCH = 128
DROP = 0.005  # of the accuracy, that the source calls significant
RATES = (0.05, 0.1, 0.2, 0.4)
SOURCE = {1: 0.9191, 2: 0.9161, 4: 0.9158, 8: 0.9111, 16: 0.8928}  # Table I, CIFAR-10
_FULL = Task("fashion-mnist", images=55000, held_out=5000, epochs=16, momentum=0.0)
_QUICK = Task("digits", images=1024, held_out=256, epochs=3, momentum=0.0)


def local_training(workers: int, lr: float, rule: str, seed: int, batch: int) -> Training:
    """P local models, at the rate of one scaled by the rule; one is plain SGD."""
    name = "local-sgd" if workers > 1 else "allreduce"
    scaled = scale_learning_rate(lr, workers, rule)
    return Training(name, workers, workers * batch, scaled, seed, lr / scaled)


def settled(distances: Sequence[float | None]) -> float | None:
    """The mean distance after the warm-up; None where training diverged."""
    late = distances[math.ceil(WARM_UP * len(distances)) :]
    return None if None in late else float(np.mean(np.array(late, dtype=float)))


def point(workers: int, runs: Sequence[Results]) -> Results:
    """What all seeds found for P."""
    accuracies = np.array([run["test"] for run in runs])
    distances = [settled(run["local_distances"]) if workers > 1 else 0.0 for run in runs]
    diverged = None in distances
    return {
        "workers": workers,
        "lr": runs[0]["lr"],
        "accuracy": float(accuracies.mean()),
        "spread": float(accuracies.std(ddof=1)) if len(runs) > 1 else None,
        "distance": None if diverged else float(np.mean(np.array(distances, dtype=float))),
        "curve": runs[0].get("local_distances", []),
        "source": SOURCE.get(workers),
    }


def borne(points: Sequence[Results]) -> int:
    """The last P whose accuracy is not significantly below that of one."""
    last = points[0]["workers"]
    for one in points[1:]:
        if one["accuracy"] < points[0]["accuracy"] - DROP:
            break
        last = one["workers"]
    return int(last)


def task_of(task: Task, lr: float, seed: int, batch: int, data_dir: str | None) -> plan.Task:
    """The same training for `find_workers`."""
    images, labels = load(task.data, data_dir, task.images, task.held_out)["train"]

    def loss(model: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
        rows = torch.from_numpy(np.random.Generator(np.random.PCG64((worker, step))).integers(len(labels), size=batch))
        return torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])

    return plan.Task(
        lambda: make_model(images.shape[2], seed),
        lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=task.momentum),
        loss,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all, one after the other."""
    options = command_line.parser("local_sgd accuracy", __doc__)
    options.add_argument("--seeds", type=int, metavar="N", help="trainings of each kind (default 3; 1 if --quick)")
    options.add_argument("--data-dir", metavar="DIR", help="the folder of the four Fashion-MNIST files")
    chosen = options.parse_args(argv)
    task, batch = (_QUICK, 32) if chosen.quick else (_FULL, BATCH)
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    counts = (1, 2, 4) if chosen.quick else tuple(SOURCE)

    def runs_of(workers: int, lr: float, rule: str) -> list[Results]:
        trainings = [local_training(workers, lr, rule, seed, batch) for seed in range(1, seeds + 1)]
        runs = [train(task, one, chosen.data_dir) for one in trainings]
        accuracies = ", ".join(f"{run['test']:.2%}" for run in runs)
        records.log(f"P={workers}, lr {trainings[0].lr:g}: {accuracies}; {sum(run['seconds'] for run in runs):.0f} s")
        return runs

    grid = {lr: runs_of(1, lr, "none") for lr in (RATES[2:3] if chosen.quick else RATES)}
    best = max(grid, key=lambda lr: float(np.mean([run["validation"] for run in grid[lr]])))
    trial = task_of(task, best, 1, batch, chosen.data_dir)
    rules: dict[str, Results] = {}
    for rule in ("linear", "sqrt"):
        points = [point(1, grid[best]), *[point(count, runs_of(count, best, rule)) for count in counts[1:]]]
        found = plan.find_workers(trial, counts[1:], INTERVAL, averagings=16, rule=rule)
        distances = {str(count): value if math.isfinite(value) else None for count, value in found.distances.items()}
        tried = {"distances": distances, "chosen": found.chosen, "reason": found.reason}
        rules[rule] = {"points": points, "borne": borne(points), "tried": tried}
    machine = machines.machine("ranks as threads (sim transport)") | {"others": None}
    results: Results = {
        "benchmark": "local_sgd_accuracy",
        "name": "local_sgd_accuracy",
        "machine": machine,
        "task": asdict(task),
        "batch": batch,
        "interval": INTERVAL,
        "seeds": seeds,
        "grid": {str(lr): float(np.mean([run["validation"] for run in runs])) for lr, runs in grid.items()},
        "rules": rules,
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
