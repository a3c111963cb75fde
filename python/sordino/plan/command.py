"""`sordino plan` on the ranks of a job."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence

import torch

import sordino.torch as hvd
from sordino._core import build_info
from sordino.errors import NotBuilt, SordinoError, UsageError
from sordino.plan import tasks
from sordino.plan.cluster import parse_cluster
from sordino.plan.costs import Rates
from sordino.plan.links import measure, nodes_of_ranks
from sordino.plan.predictions import Job, Prediction, Shapes, as_rows, predict, recommend, trial
from sordino.plan.report import REPORTS
from sordino.plan.workers import Task, Workers, find_workers
from sordino.record.writing import Lines, job_file, jsonable, removed_after_error
from sordino.report import Results, machines, records
from sordino.timing import Participants, Watch

_DEFAULT = 25_600_000  # ResNet-50
_BLOCKS = 16
_SHARES = {"rates": 0.25, "trial": 0.6}  # fractions of the budget; the rest is for local models
_MOST_MODELS = 16
_IMAGES = "digits"


def is_first() -> bool:
    """Return whether this is the rank that prints."""
    return not hvd.is_initialized() or hvd.rank() == 0


def main(options: argparse.Namespace, count: int | None) -> int:
    """Measure, predict, try and print. `count` is the number of parameters; None: those of the task, or the default.

    Collective.

    Raises:
        UsageError: there is only one rank, or the task is invalid.
    """
    torch.set_num_threads(1)
    hvd.init()
    if hvd.size() == 1:
        raise UsageError("a single rank does not communicate; start more, as in: sordino plan -np 4")
    log = records.log if hvd.rank() == 0 else _silent
    task, problem = _agreed(lambda: _task(options))
    if problem is not None:
        if options.task is not None or options.data is not None or not isinstance(problem, NotBuilt):
            raise problem
        log(f"local models are not tried: {problem}")
    shapes = _shapes(options, count, task)
    record = None if options.record is None else _record(options)
    with removed_after_error([] if record is None else [record]):
        results = _measured(options, shapes, task, log)
    if hvd.rank() == 0:
        if record is not None:
            record.write("result", time=time.time(), found=jsonable(results))
            record.close()
        _tell(options, results)
    hvd.shutdown()
    return 0


def _measured(options: argparse.Namespace, shapes: Shapes, task: Task | None, log: Callable[[str], None]) -> Results:
    """Measure, predict and try. Collective."""
    job = Job(shapes, options.compute_ms / 1e3, options.samples, options.batch)
    mpi = build_info()["mpi"]
    machine = machines.machine(mpi["library"] if mpi else None)
    watch = Watch(Participants(hvd.rank(), hvd.size(), None, one_node=hvd.cross_size() == 1))
    nodes = nodes_of_ranks()
    log("measuring the links")
    rates, samples = measure(sum(job.bytes), _SHARES["rates"] * options.budget)
    predictions = predict(job, nodes, rates, options.interval)
    if not options.no_run:
        log("running every algorithm")
        trial(predictions, job.shapes, _SHARES["trial"] * options.budget, log)
    workers = None
    if task is not None:
        log("trying local models")
        most = max(_MOST_MODELS, 1 << (hvd.size().bit_length() - 1))
        counts = [1 << power for power in range(1, most.bit_length())]
        share = (1 - sum(_SHARES.values())) * options.budget
        workers = find_workers(task, counts, options.interval, rule=options.rule, budget=share)
    machine["others"] = watch.others()
    results = _results(options, job, nodes, rates, predictions, workers)
    return results | {"machine": machine, "samples_of_rates": samples}


def assume(options: argparse.Namespace, count: int | None) -> int:
    """Predict for an assumed cluster, and print. Runs nothing.

    Raises:
        UsageError: the cluster is invalid.
    """
    cluster = parse_cluster(options.nodes, options.gbps, options.latency_us)
    job = Job(_shapes(options, count, None), options.compute_ms / 1e3, options.samples, options.batch)
    size = len(cluster.places)
    predictions = predict(job, cluster.places, cluster.rates, options.interval)
    results = _results(options, job, cluster.places, cluster.rates, predictions, None)
    results["assumed"] = cluster.described
    if options.record is not None:
        setting = {**_setting(options, size), "Assumed": cluster.described}
        record = job_file(options.record, "plan", setting=setting)
        record.write("result", time=time.time(), found=jsonable(results))
        record.close()
    _tell(options, results)
    return 0


def _results(
    options: argparse.Namespace,
    job: Job,
    places: Sequence[int],
    rates: Rates,
    predictions: Sequence[Prediction],
    workers: Workers | None,
) -> Results:
    return {
        "benchmark": "plan",
        "name": "plan",
        "ranks": len(places),
        "nodes": max(places) + 1,
        "parameters": sum(job.bytes) // 4,
        "compute_ms": options.compute_ms,
        "samples": options.samples,
        "batch": options.batch,
        "interval": options.interval,
        "rates": rates.as_results(),
        "samples_of_rates": [],
        "rows": as_rows(predictions),
        "workers": None if workers is None else _workers(workers, options.task or options.data or _IMAGES),
        "recommendation": recommend(predictions, len(places), workers),
    }


def _tell(options: argparse.Namespace, results: Results) -> None:
    if options.json:
        print(json.dumps(results, ensure_ascii=False), flush=True)
        records.save(results, options.results, REPORTS)
    else:
        records.publish(results, options.results, REPORTS)


def _task(options: argparse.Namespace) -> Task | None:
    if options.task is not None:
        return tasks.from_file(options.task)
    return None if options.data == "none" else tasks.images(options.data or _IMAGES, options.data_dir)


def _agreed(make: Callable[[], Task | None]) -> tuple[Task | None, SordinoError | None]:
    """Return the result of `make`, or the error of the first rank on which it failed. Collective."""
    task, mine = None, None
    try:
        task = make()
    except SordinoError as error:
        mine = (isinstance(error, NotBuilt), str(error))
    for rank, refusal in enumerate(hvd.allgather_object(mine, name="plan.task")):
        if refusal is not None:
            lacking, text = refusal
            return None, (NotBuilt if lacking else UsageError)(text if rank == 0 else f"rank {rank}: {text}")
    return task, None


def _record(options: argparse.Namespace) -> Lines | None:
    """Return the record of this plan on the first rank. Collective: if it cannot be written, all ranks raise."""
    made, problem = None, None
    try:
        made = job_file(options.record, "plan", setting=_setting(options, hvd.size())) if hvd.rank() == 0 else None
    except UsageError as error:
        problem = str(error)
    problem = hvd.allgather_object(problem, name="plan.record")[0]
    if problem is not None:
        raise UsageError(problem)
    return made


def _setting(options: argparse.Namespace, ranks: int) -> dict[str, object]:
    return {
        "Ranks": ranks,
        "Computation per step": f"{options.compute_ms:g} ms",
        "Samples per epoch": options.samples,
        "Samples per step and worker": options.batch,
    }


def _silent(_: str) -> None:
    """Log of all ranks but the first: does nothing."""


def _shapes(options: argparse.Namespace, count: int | None, task: Task | None) -> Shapes:
    if count is not None:
        return even_shapes(count)
    if options.task:
        assert task is not None
        found = [(name, tuple(parameter.shape)) for name, parameter in task.model().named_parameters()]
        if not found:
            raise UsageError(f"--task {options.task}: its model has no parameters")
        return found
    return even_shapes(_DEFAULT)


def even_shapes(count: int) -> Shapes:
    """Return shapes of `count` parameters, in up to 16 blocks of equal size."""
    blocks = min(_BLOCKS, count)
    sizes = [count // blocks + (k < count % blocks) for k in range(blocks)]
    return [(f"blocks.{k}.weight", (size,)) for k, size in enumerate(sizes)]


def _workers(found: Workers, task: str) -> Results:
    distances = {str(count): value if math.isfinite(value) else None for count, value in found.distances.items()}
    curves = {str(count): curve for count, curve in found.curves.items()}
    return {
        "task": os.path.basename(task),
        "distances": distances,
        "curves": curves,
        "chosen": found.chosen,
        "reason": found.reason,
    }
