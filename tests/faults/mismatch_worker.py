"""A rank of a job whose ranks do not fit together: `python mismatch_worker.py FOLDER CASES ODD`.

CASES are separated by commas. FOLDER gets report.R of each rank R. The report has, by case and attempt, the
error, its time after the start of the attempt, and whether the world still works afterwards. See
test_stop_mismatches.py.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STUCK_S = 250
RANKS = 3
VARIABLES = (
    "SORDINO_CHUNK_BYTES=65536",
    "SORDINO_FUSION_BYTES=0",
    "SORDINO_GPU_ROUTE=host",
    "SORDINO_RANKS_PER_NODE=1",
    "SORDINO_SHARED_MEMORY=0",
    "SORDINO_SPIN_US=0",
    "SORDINO_CPU_LEVEL=baseline",
    "SORDINO_TIMEOUT_S=4",
)
folder, cases, odd = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
me = int(os.environ.get("SORDINO_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
faulthandler.dump_traceback_later(STUCK_S, exit=True)
if cases == ["version"] and me == odd:
    sys.path.insert(0, str(folder / "other"))  # the test has put another version here

import torch  # noqa: E402

import sordino.torch as hvd  # noqa: E402
from sordino.algorithms import Algorithm, AllReduce, CaPS, Crossover, Layered, LocalSGD  # noqa: E402

torch.set_num_threads(1)
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)  # the first one imports much of torch, which takes seconds
attempts: list[dict[str, Any]] = []


def attempt(label: str, call: Callable[[], object], alive: bool = True) -> None:
    """Note the error of a call, and whether ranks can still communicate."""
    begin = time.monotonic()
    told: dict[str, Any] = {"label": label, "kind": "nothing", "text": ""}
    try:
        call()
    except hvd.HorovodInternalError as error:
        told |= {"kind": type(error).__name__, "text": str(error)}
        for name in ("missing", "operation", "settings", "tensors"):
            if hasattr(error, name):
                told[name] = getattr(error, name)
    told["seconds"] = time.monotonic() - begin
    if alive:
        told["sum"] = hvd.allreduce(torch.tensor([float(me)]), op=hvd.Sum, name=f"after {label}").item()
    attempts.append(told)


def network(**changes: Any) -> torch.nn.Module:
    sizes = {"middle": 6, "parts": 2, **changes}
    layers = [torch.nn.Linear(4, sizes["middle"]), torch.nn.Linear(sizes["middle"], 3)]
    return torch.nn.Sequential(*layers[: sizes["parts"]])


def wrapped(model: torch.nn.Module, **options: Any) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def mismatches() -> None:
    """Attempt other shapes, dtypes, orders and numbers of tensors, in single operations and in models."""
    mine = me == odd
    attempt("shape", lambda: hvd.allreduce(torch.ones(1000 + mine), name="gradient"))
    attempt("dtype", lambda: hvd.allgather(torch.ones(9, dtype=torch.half if mine else torch.float), name="rows"))
    attempt("group", lambda: hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(3)] * (2 + mine), name="group")))
    attempt("model shape", lambda: wrapped(network(middle=7 if mine else 6)))
    attempt("model dtype", lambda: wrapped(network().to(torch.float64 if mine else torch.float32)))
    attempt("missing parameter", lambda: wrapped(network(parts=1 if mine else 2)))

    def other_order() -> None:
        model = network()
        named = list(model.named_parameters())
        hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in (named[::-1] if mine else named)], lr=0.1), named)

    attempt("parameter order", other_order)

    def any_order() -> None:
        """Start asynchronous operations in any order."""
        names = [f"tensor {number}" for number in range(20)]
        handles = {name: hvd.allreduce_async(torch.ones(50), name=name) for name in (names[::-1] if mine else names)}
        for name in names:
            hvd.synchronize(handles[name])

    attempt("order", any_order)


def settings() -> None:
    """Attempt other arguments of DistributedOptimizer."""
    mine = me == odd
    attempt("seed", lambda: wrapped(network(), algorithm=Crossover(seed=2 if mine else 1)))
    attempt("algorithm", lambda: wrapped(network(), algorithm=LocalSGD() if mine else AllReduce()))
    attempt("passes", lambda: wrapped(network(), backward_passes_per_step=3 if mine else 1))
    attempt("compression", lambda: wrapped(network(), compression=getattr(hvd.Compression, "fp16" if mine else "none")))


def not_finite() -> None:
    """Attempt NaN on one rank, with algorithms that exchange gradients, parameters, or shards."""
    chosen: list[Algorithm] = [AllReduce(), Crossover(), LocalSGD(2, hvd.size()), Layered(1), CaPS()]
    for algorithm in chosen:
        model = network()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = wrapped(model, algorithm=algorithm, check_finite=True)
        for turn in range(4):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            loss = model(torch.full((5, 4), 0.1 + turn + me)).square().mean()
            (loss + (model[1].weight * math.nan).sum() if turn == 2 and me == odd else loss).backward()
            if turn == 2:
                label = type(algorithm).__name__
                attempt(label, lambda: (optimizer.step(), optimizer.synchronize()))  # noqa: B023
                attempts[-1]["intact"] = all(map(torch.equal, before, model.parameters()))
            else:
                optimizer.step()
        optimizer.flush()
        attempts[-1]["went on"] = all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def missing_tensor() -> None:
    """One rank never calls the operation that the others call; it calls another one."""
    hvd.allreduce(torch.ones(3), name="both")
    attempt("missing", lambda: hvd.allreduce(torch.ones(3), name="left" if me == odd else "right"), alive=False)


def environments() -> None:
    """Attempt the differences that init() finds: variables, each on another odd rank, and whether some ranks have no
    model."""
    for number, variable in enumerate(VARIABLES):
        name, _, value = variable.partition("=")
        before = os.environ.get(name)
        if me == number % RANKS:
            os.environ[name] = value
        attempt_init(variable)
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    attempt_init("helpers", Layered(1, "rank") if me != 2 else None)


def attempt_init(label: str, algorithm: Algorithm | None = None) -> None:
    """Note the error of init(); if there is none, shut down again."""
    attempt(label, lambda: hvd.init(algorithm=algorithm), alive=False)
    if hvd.is_initialized():
        hvd.shutdown()


CASES = {
    "environments": environments,
    "version": lambda: attempt_init("version"),
    "mismatches": mismatches,
    "settings": settings,
    "not finite": not_finite,
    "missing tensor": missing_tensor,
}


def main() -> None:
    reports: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        if case not in ("environments", "version") and not hvd.is_initialized():
            hvd.init()
        CASES[case]()
        reports[case], attempts[:] = attempts[:], []
    hvd.shutdown()
    (folder / f"report.{me}.new").write_text(json.dumps(reports))
    (folder / f"report.{me}.new").rename(folder / f"report.{me}")


if __name__ == "__main__":
    main()
