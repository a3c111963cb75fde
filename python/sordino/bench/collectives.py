"""All-reduce of float32 against MPI, Gloo, Horovod and the memory floor, interleaved in one run.

  mpirun -np 2 python benchmarks/collectives.py --baselines mpi,gloo,horovod

Contestants, each with its own memory, each checked once per size:
  arena     sordino allreduce_(op=Average) of an hvd.shared_empty tensor, in place
  ordinary  the same with an ordinary tensor
  floor     no communication: all ranks at once read and write, in private memory, the bytes of an in-place average
  mpi       MPI_Allreduce, in place, MPI_SUM (a plain sum, which is less work than an average)
  gloo      torch.distributed.all_reduce, then the division
  horovod   horovod.torch.allreduce_(op=Average)
Calls are blocking and named, so that Horovod's response cache applies. Each time is that of the slowest rank, from a
common barrier to the return of the call.

Contestants take turns. Horovod is initialized before and shut down after each of its turns, because its thread slows
down everything else in the process, MPI most of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

import sordino.torch as hvd
from sordino._core import kernels
from sordino.bench import baselines, command_line
from sordino.bench.baselines import Baselines
from sordino.bench.report import REPORTS
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_bytes, format_seconds
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.timing import Participants, Watch, race

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
ORDER = ("arena", "ordinary", "floor", "mpi", "gloo", "horovod")


@dataclass
class Contestant:
    """One implementation of the all-reduce.

    Attributes:
        tensor: the tensor to reduce. In the check all its elements are r + 1 on rank r.
        run: function that makes one blocking call.
        averages: whether the result is the average and not the sum.
    """

    tensor: torch.Tensor
    run: Callable[[], object]
    averages: bool = True

    def is_right(self, participants: Participants) -> bool:
        """Return whether a call on known input has the right result. Collective."""
        self.tensor.fill_(participants.rank + 1)
        self.run()
        expected = participants.size * (participants.size + 1) / 2 / (participants.size if self.averages else 1)
        wrong = not bool((self.tensor == expected).all())
        return bool(participants.maximum(np.array([float(wrong)]))[0] == 0)


def _arena(name: str, count: int) -> Contestant:
    tensor = hvd.shared_empty(count, dtype=torch.float32)
    return Contestant(tensor, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Average))


def _ordinary(name: str, count: int) -> Contestant:
    tensor = torch.zeros(count)
    return Contestant(tensor, lambda: hvd.allreduce_(tensor, name=name, op=hvd.Average))


def averaging_alone(count: int, ranks: int) -> Callable[[], object]:
    """Return a function that reads and writes a rank's share of `ranks` float32 arrays, like an in-place average."""
    share = -(-count // ranks)
    arrays = torch.full((ranks, share), 1.5)
    places = [row.data_ptr() for row in arrays]
    code = DTYPE_CODES[torch.float32]

    def run(keep: torch.Tensor = arrays) -> None:
        kernels.reduce(Sum, code, places, places, share, 1.0, 1 / ranks)

    return run


def _mpi(found: Baselines, participants: Participants, count: int) -> Contestant:
    mpi, communicator = found.mpi, participants.communicator
    tensor = torch.zeros(count)
    buffer = tensor.numpy()
    return Contestant(tensor, lambda: communicator.Allreduce(mpi.IN_PLACE, buffer, op=mpi.SUM), averages=False)


def _gloo(found: Baselines, participants: Participants, count: int) -> Contestant:
    tensor = torch.zeros(count)

    def run() -> None:
        found.gloo.all_reduce(tensor)
        tensor.div_(participants.size)

    return Contestant(tensor, run)


def _horovod(found: Baselines, name: str, count: int) -> Contestant:
    tensor = torch.zeros(count)
    horovod = found.horovod
    return Contestant(tensor, lambda: horovod.allreduce_(tensor, name=name, op=horovod.Average))


def measure(size: int, found: Baselines, participants: Participants, budget: float) -> Results:
    """Measure one row of the results: every contestant on `size` bytes. Collective."""
    count = size // 4
    name = f"bench.{size}"
    contestants = {
        "arena": _arena(f"{name}.arena", count),
        "ordinary": _ordinary(f"{name}.ordinary", count),
        "floor": Contestant(torch.empty(0), averaging_alone(count, participants.size)),
    }
    if found.mpi is not None:
        contestants["mpi"] = _mpi(found, participants, count)
    if found.gloo is not None:
        contestants["gloo"] = _gloo(found, participants, count)
    if found.horovod is not None:
        contestants["horovod"] = _horovod(found, name, count)
    right = {"floor": True}
    for key, one in contestants.items():
        if key != "floor":
            with found.horovod_turn() if key == "horovod" else nullcontext():
                right[key] = one.is_right(participants)
        # Sums would grow from call to call unless all inputs are 0. Averages of equal numbers do not change.
        one.tensor.fill_(1.5 if one.averages else 0.0)
    watch = Watch(participants)
    runs = {key: one.run for key, one in contestants.items()}
    samples = race(runs, participants, budget, turns={"horovod": found.horovod_turn})
    entries = {}
    for key in contestants:
        summary = samples[key].summary()
        speed = size / summary["median"] / 1e9
        entries[key] = summary | {
            "algbw": speed,
            "busbw": speed * 2 * (participants.size - 1) / participants.size,
            "right": right[key],
        }
    return {"bytes": size, "contestants": entries, "others": watch.others()}


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the requirements on two ranks of one two-core machine."""
    by_size = {row["bytes"]: row for row in rows}
    large, small = by_size.get(64 << 20), by_size.get(64 << 10)
    entries = []
    for row, key, other, limit in (
        (large, "arena", "horovod", 5.0),
        (large, "arena", "mpi", 4.0),
        (large, "ordinary", "horovod", 2.5),
        (small, "ordinary", "horovod", 20.0),
    ):
        if row is not None:
            what = f"{format_bytes(row['bytes'])}: {key} faster than {baselines.LABELS[other]}"
            entries.append(verdicts.target(what, verdicts.ratio(row, other, key), limit, at_least=True))
    if large is not None:
        entries.append(
            verdicts.target("64 MiB: arena against the floor", verdicts.ratio(large, "arena", "floor"), 1.5, False)
        )
    for key in ("arena", "ordinary"):
        from_256k = [row for row in rows if row["bytes"] >= 256 << 10]
        found = [(verdicts.ratio(row, "mpi", key), row["bytes"]) for row in from_256k]
        worst = min(((value, size) for value, size in found if value is not None), default=None)
        if from_256k:
            where = f" (worst: {format_bytes(worst[1])})" if worst else ""
            value = worst[0] if worst else None
            entries.append(verdicts.target(f"from 256 KiB: {key} never slower than MPI{where}", value, 1.0, True))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark on all ranks. Return status 1 if a contestant had a wrong result."""
    options = command_line.parser("collectives", __doc__, 8.0, "size")
    options.add_argument(
        "--baselines", default="mpi,gloo,horovod", metavar="LIST", help="of mpi, gloo, horovod; or none"
    )
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"default {SIZES}")
    chosen = options.parse_args(argv)
    sizes = [command_line.parse_bytes(text) for text in chosen.sizes.split(",")]
    names = baselines.parse_names(chosen.baselines)
    torch.set_num_threads(1)
    participants, library = baselines.start()
    found_machine, watch = machines.machine(library), Watch(participants)
    found = baselines.open_all(names, participants)
    rows = []
    for size in sizes:
        rows.append(measure(size, found, participants, 0.3 if chosen.quick else chosen.budget))
        if participants.rank == 0:
            times = [f"{key} {format_seconds(one['median'])}" for key, one in rows[-1]["contestants"].items()]
            others = machines.describe_others(rows[-1]["others"])
            records.log(f"{format_bytes(size):>8}: {', '.join(times)}{others}")
    found_machine["others"] = watch.others()
    found.close()
    wrong = [
        f"{key} at {format_bytes(row['bytes'])}"
        for row in rows
        for key, one in row["contestants"].items()
        if not one["right"]
    ]
    if participants.rank == 0:
        results: Results = {
            "benchmark": "collectives",
            "name": "collectives",
            "machine": found_machine,
            "ranks": participants.size,
            "nodes": hvd.cross_size(),
            "baselines": found.notes,
            "rows": rows,
            "wrong": wrong,
            "targets": targets(rows),
        }
        records.publish(results, command_line.results_folder(chosen), REPORTS)
        for line in wrong:
            records.log(f"wrong result: {line}")
    hvd.shutdown()
    return 1 if wrong else 0
