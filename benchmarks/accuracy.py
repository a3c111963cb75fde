"""Test accuracy against the global mini-batch and against the number of workers: AllReduce, SGP and Crossover.

  python benchmarks/accuracy.py --jobs 2        # Figures 6 to 8 of the Crossover-SGD paper, in small

Trains a network of three linear layers on a part of Fashion-MNIST, for a fixed number of epochs, with real
DistributedOptimizers on ranks that are threads. Every method gets the learning rate of a grid that suits it best on
images held out of training. What is tested is the mean of the workers' models. An interrupted benchmark goes on where
it was when it is started again with the same options.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from claims.accuracy.claims import METHODS, claims, points
from claims.accuracy.report import REPORTS
from claims.accuracy.training import Task, Training, group_size, train
from sordino.bench import command_line
from sordino.pool import pool
from sordino.report import Results, machines, records


@dataclass(frozen=True)
class Plan:
    """Which trainings there are.

    Attributes:
        batches, batch_workers: the first figure's global mini-batches, and its number of workers.
        workers, worker_batch: the second figure's numbers of workers, and its global mini-batch.
        rates: the grid of learning rates, smallest first.
    """

    task: Task
    batches: tuple[int, ...]
    batch_workers: int
    workers: tuple[int, ...]
    worker_batch: int
    rates: tuple[float, ...]
    seeds: int

    def trainings(self) -> list[Training]:
        """All of them, each once, the first seed's first."""
        places = [(self.batch_workers, batch) for batch in self.batches]
        places += [(workers, self.worker_batch) for workers in self.workers]
        return [
            Training(name, *place, lr, seed)
            for seed in range(1, self.seeds + 1)
            for place in dict.fromkeys(places)
            for name in METHODS
            for lr in self.rates
        ]

    def described(self) -> dict[str, Any]:
        """For the results."""
        return {
            "task": asdict(self.task),
            "batch_figure": {"workers": self.batch_workers, "batches": list(self.batches)},
            "worker_figure": {"batch": self.worker_batch, "workers": list(self.workers)},
            "rates": list(self.rates),
            "seeds": self.seeds,
            "group_sizes": {str(one): group_size(one) for one in sorted({self.batch_workers, *self.workers})},
        }


FULL = Plan(
    task=Task("fashion-mnist", images=24576, held_out=5000, epochs=12),
    batches=(512, 2048, 4096, 8192),
    batch_workers=8,
    workers=(4, 8, 16, 32),
    worker_batch=2048,
    rates=(0.05, 0.071, 0.1, 0.141, 0.2, 0.283),
    seeds=5,
)
QUICK = Plan(
    task=Task("digits", images=1024, held_out=256, epochs=4),
    batches=(64, 128),
    batch_workers=4,
    workers=(2, 4),
    worker_batch=64,
    rates=(0.1,),
    seeds=1,
)


def _kept(folder: Path, task: Task, training: Training) -> Results | None:
    """What an earlier run of the benchmark has found; None if it has not come so far, or had another task."""
    path = folder / f"{training.key}.json"
    if not path.exists():
        return None
    try:
        found: Results = json.loads(path.read_text(encoding="utf-8"))
        return found["run"] if found["task"] == asdict(task) else None
    except (ValueError, LookupError, TypeError, RecursionError):  # not one of ours, so it is made again
        return None


def run_all(plan: Plan, folder: Path, jobs: int, data_dir: str | None) -> list[Results]:
    """Trains what is not in the folder yet, in `jobs` processes, and puts it there; returns all in the plan's order."""
    trainings = plan.trainings()
    runs = {one: found for one in trainings if (found := _kept(folder, plan.task, one)) is not None}
    if runs:
        records.log(f"{len(runs)} of {len(trainings)} trainings are done already")
    missing = [one for one in trainings if one not in runs]
    begin, done, ahead = time.monotonic(), 0.0, sum(one.cost(plan.task) for one in missing)
    with pool(jobs) as processes:
        futures = {processes.submit(train, plan.task, one, data_dir): one for one in missing}
        for future in as_completed(futures):
            one, run = futures[future], future.result()
            runs[one] = run
            records.write({"name": one.key, "task": asdict(plan.task), "run": run}, folder)
            done, ahead = done + one.cost(plan.task), ahead - one.cost(plan.task)
            left = (time.monotonic() - begin) / done * ahead / 60
            records.log(
                f"[{len(runs)}/{len(trainings)}] {METHODS[one.algorithm]}, {one.workers} workers, batch "
                f"{one.batch}, lr {one.lr:g}, seed {one.seed}: {run['test']:.2%} in {run['seconds']:.1f} s; "
                f"about {left:.1f} min left"
            )
    return [runs[one] for one in trainings]


@contextmanager
def _work_folder(results: Path | None) -> Iterator[Path]:
    """Where single trainings are kept until all are done."""
    if results is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    folder = results / "accuracy_trainings"
    yield folder
    shutil.rmtree(folder)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        prog="accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="where to write (default: benchmarks/results, else results)"
    )
    parser.add_argument("--quick", action="store_true", help="a short try; writes nothing unless --results says where")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="trainings at a time (default 1)")
    parser.add_argument("--seeds", type=_positive, metavar="N", help="trainings of each kind (default 5; 1 if --quick)")
    parser.add_argument("--data-dir", metavar="DIR", help="the folder of the four Fashion-MNIST files")
    options = parser.parse_args(argv)
    plan = QUICK if options.quick else FULL
    if options.seeds is not None:
        plan = Plan(**{**plan.__dict__, "seeds": options.seeds})
    folder = command_line.results_folder(options)
    with _work_folder(folder) as work:
        runs = run_all(plan, work, options.jobs, options.data_dir)
        found, described = points(runs), plan.described()
        machine = machines.machine("ranks as threads (sim transport)") | {"others": None}
        results: Results = {"benchmark": "accuracy", "name": "accuracy", "machine": machine, **described}
        results |= {"claims": claims(found, described), "points": found, "runs": runs}
        records.publish(results, folder, REPORTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
