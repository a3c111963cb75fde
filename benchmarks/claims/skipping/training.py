"""Accuracy against the bytes that parameter skipping sends, for detectors, thresholds and probe intervals.

  python benchmarks/skipping.py training

Four workers (threads) train a convolutional network on Fashion-MNIST for two epochs: mini-batches of 32 a worker, SGD
with momentum, a learning rate that falls to a half in 400 steps. A metric, the training loss since the last one, is
reported ten times an epoch, as if those were epochs: two real ones are too few for a scheduler to act on. Only the
training with a scheduler heeds it. Thresholds and probe intervals are swept with the naive detector.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import nn

import sordino.torch as hvd
from claims.accuracy.training import Part, Task, accuracy_of, load
from claims.skipping.report import DROP, REPORTS, swept
from sordino import sim
from sordino.algorithms import ParameterSkipping, ThresholdScheduler
from sordino.algorithms.caps.statistics import Point, SkippingStatistics
from sordino.bench import command_line
from sordino.report import Results, machines, records, verdicts

WORKERS = 4
BATCH = 32  # of a worker
METRICS = 10  # reports of a metric, in an epoch
RATE = 0.05
_HALVED = 400  # steps after which the rate is half of that
THRESHOLDS = (90.0, 60.0, 30.0, 10.0, 1.0, 0.0)
PROBES = (2, 4, 10)
_FULL = Task("fashion-mnist", images=60000, held_out=0, epochs=2)
_QUICK = Task("digits", images=1280, held_out=0, epochs=2)
_NEVER = 1 << 30  # steps: each report makes a point


@dataclass(frozen=True)
class Contestant:
    """An algorithm by name; `probes` and `threshold` say which sweeps it belongs to."""

    name: str
    algorithm: ParameterSkipping
    threshold: float | None = None
    probes: int | None = None


def contestants(thresholds: Sequence[float], probes: Sequence[int]) -> list[Contestant]:
    """The first is what all are compared with."""
    usual = ParameterSkipping(statistics_interval=_NEVER)
    scheduler = ThresholdScheduler(history_length=3, frequency=2)
    found = [
        Contestant("unskipped", replace(usual, threshold=101.0)),
        Contestant("naive", usual, usual.threshold, usual.probe_interval),
        Contestant("random", replace(usual, detector="random")),
        Contestant("history", replace(usual, detector="history")),
        Contestant("naive, blocks", replace(usual, granularity="block")),
        Contestant("naive, scheduler", replace(usual, scheduler=scheduler)),
    ]
    for threshold in thresholds:
        if threshold != usual.threshold:
            found.append(Contestant(f"naive, {threshold:g} %", replace(usual, threshold=threshold), threshold))
    for interval in probes:
        if interval != usual.probe_interval:
            one = replace(usual, probe_interval=interval)
            found.append(Contestant(f"naive, {interval} steps between probes", one, probes=interval))
    return found


def make_network(image_size: int, seed: int) -> nn.Sequential:
    """Two convolutions and two linear layers: 206,922 parameters for 28 x 28 images, 71,754 for 8 x 8."""
    torch.manual_seed(seed)
    second = 2 if image_size >= 16 else 1
    cells = image_size // 2 // second
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(second),
        nn.Flatten(), nn.Linear(32 * cells * cells, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def parameters_hash(model: nn.Module) -> str:
    """Equal where models are, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def all_equal(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters. Collective."""
    return len(set(hvd.allgather_object(parameters_hash(model), name="bench.hashes"))) == 1


def train(task: Task, algorithm: ParameterSkipping, seed: int, data_dir: str | None) -> Results:
    """Trains on threads; what the first worker found."""
    data = load(task.data, data_dir, task.images, task.held_out)
    model = make_network(data["train"][0].shape[2], seed)
    begin = time.perf_counter()
    found = sim.run(WORKERS, _work, task, algorithm, seed, data, model)[0]
    return found | {"seconds": time.perf_counter() - begin}


def _work(task: Task, algorithm: ParameterSkipping, seed: int, data: Mapping[str, Part], initial: nn.Module) -> Results:
    """What every worker does."""
    torch.set_num_threads(1)
    images, labels = data["train"]
    model = copy.deepcopy(initial)
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=task.momentum)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), algorithm=algorithm)
    each = len(labels) // (WORKERS * BATCH)  # steps an epoch; images that do not fill the last are left out
    loss_sum, last, sent = 0.0, 0, 0.0
    for epoch in range(task.epochs):
        order = np.random.Generator(np.random.PCG64((seed, epoch))).permutation(len(labels))
        for step in range(1, each + 1):
            rows = torch.from_numpy(order[((step - 1) * WORKERS + hvd.rank()) * BATCH :][:BATCH])
            for group in optimizer.param_groups:
                group["lr"] = RATE / (1 + (epoch * each + step - 1) / _HALVED)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            before = hvd.stats()["bytes_sent"]
            optimizer.step()
            sent += hvd.stats()["bytes_sent"] - before
            loss_sum += loss.item()
            if step * METRICS // each > (step - 1) * METRICS // each:
                optimizer.report_metric(loss_sum / (epoch * each + step - last))
                loss_sum, last = 0.0, epoch * each + step
    optimizer.flush()
    equal, mean = all_equal(model), hvd.allreduce(torch.tensor([sent], dtype=torch.float64), name="bench.sent")
    if hvd.rank() != 0:
        return {}
    return {
        "accuracy": accuracy_of(model, data["test"]),
        "right": equal,
        "steps": task.epochs * each,
        "bytes": float(mean) / (task.epochs * each),
        "statistics": optimizer.statistics,
    }


def summary(one: Contestant, runs: Sequence[Results]) -> Results:
    """What all seeds found; the course of the first."""
    accuracies = np.array([run["accuracy"] for run in runs])
    first: SkippingStatistics = runs[0]["statistics"]
    shares = [run["statistics"].bytes_sent / run["statistics"].bytes_unskipped for run in runs]
    return {
        "name": one.name,
        "threshold": one.threshold,
        "probes": one.probes,
        "accuracy": float(accuracies.mean()),
        "spread": float(accuracies.std(ddof=1)) if len(runs) > 1 else None,
        "share": float(np.mean(shares)),
        "bytes": float(np.mean([run["bytes"] for run in runs])),
        "right": all(run["right"] for run in runs),
        "tensors": first.names,
        "points": [_rounded(point) for point in first.points],
    }


def _rounded(point: Point) -> Results:
    ratios = [round(ratio, 3) for ratio in point.ratios if ratio is not None]
    share = round(point.bytes_sent / max(point.bytes_unskipped, 1), 3)
    return {"step": point.step, "threshold": point.threshold, "ratios": ratios, "share": share}


def suffers_at(rows: Sequence[Results], what: str) -> float | None:
    """The first value of a sweep, from little skipped to much, with which accuracy is significantly below that of the
    first row, unskipped; None if there is none."""
    for row in swept(rows, what):
        if row["accuracy"] < rows[0]["accuracy"] - DROP:
            return float(row[what])
    return None


def targets(rows: Sequence[Results]) -> list[Results]:
    """Skipping at its defaults costs no accuracy, and sends less."""
    named = {row["name"]: row for row in rows}
    loss = named["unskipped"]["accuracy"] - named["naive"]["accuracy"]
    ratio = named["naive"]["bytes"] / named["unskipped"]["bytes"]
    return [
        verdicts.target("naive at its defaults: points of accuracy below unskipped", 100 * loss, 100 * DROP, False),
        verdicts.target("naive at its defaults: bytes, over unskipped", ratio, 0.9999, at_least=False),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all, one after the other. Status 1 if workers ended with different parameters."""
    options = command_line.parser("skipping training", __doc__, 0.0, "(not used)")
    options.add_argument("--seeds", type=int, metavar="N", help="trainings of each kind (default 3; 1 if --quick)")
    options.add_argument("--data-dir", metavar="DIR", help="the folder of the four Fashion-MNIST files")
    chosen = options.parse_args(argv)
    task = _QUICK if chosen.quick else _FULL
    seeds = chosen.seeds or (1 if chosen.quick else 3)
    thresholds, probes = (THRESHOLDS[-1:], PROBES[:1]) if chosen.quick else (THRESHOLDS, PROBES)
    rows, steps = [], 0
    for one in contestants(thresholds, probes):
        runs = [train(task, one.algorithm, seed, chosen.data_dir) for seed in range(1, seeds + 1)]
        rows.append(summary(one, runs))
        steps = runs[0]["steps"]
        accuracies = ", ".join(f"{run['accuracy']:.2%}" for run in runs)
        seconds = sum(run["seconds"] for run in runs)
        records.log(f"{one.name}: {accuracies}, {rows[-1]['share']:.1%} sent; {seconds:.0f} s")
    wrong = [row["name"] for row in rows if not row["right"]]
    results: Results = {
        "benchmark": "skipping_training",
        "name": "skipping_training",
        "machine": machines.machine("ranks as threads (sim transport)") | {"others": None},
        "task": asdict(task),
        "workers": WORKERS,
        "batch": BATCH,
        "reports": METRICS,
        "seeds": seeds,
        "steps": steps,
        "rows": rows,
        "suffers": {what: suffers_at(rows, what) for what in ("threshold", "probes")},
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
