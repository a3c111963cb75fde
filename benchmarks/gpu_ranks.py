"""Averaging between ranks that take turns on one GPU: in memory that all of them map, and through the host.

  sordino run -np 2 -- python benchmarks/gpu_ranks.py

Processes that share a GPU use it one after the other, a time slice each (unless MPS runs). A rank that waits for
another rank's kernel also waits for that rank's time slice. So these times compare routes; they do not apply to
ranks with their own GPUs. First, copies without communication measure the cost of slices: on one rank while the others
idle, and on all ranks at once.

Contestants, each with its own memory and a check of its result:
  arena     sordino allreduce_(op=Average) of an hvd.shared_empty tensor of the GPU, in place
  fresh     the same for an ordinary tensor, such as a gradient that backward has just made
  gossip    an exchange of Crossover, of one parameter of the same size
  by hand   a copy into pinned memory on the stream and a wait for it, our all-reduce of that memory, and a copy back
  mpi       the same with MPI_Allreduce (MPI_SUM) between the copies, and a division on the GPU; needs mpirun, mpi4py
A call ends when the GPU has finished. All contestants are timed in two worlds: with the default route, and with
SORDINO_GPU_ROUTE=host. The last two do not depend on the route, so they compare the worlds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import sordino.torch as hvd
from gpu import place as places
from gpu.place import Place
from gpu.ranks_report import REPORTS
from sordino._core import build_info
from sordino.algorithms import Crossover
from sordino.bench import baselines, command_line
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_bytes, format_seconds
from sordino.runtime.context import current
from sordino.timing import Participants, Watch, race

SIZES = "1MiB,25MiB,100MiB"
OURS = ("arena", "fresh", "gossip")
ROUTES = {"default": "", "host": "host"}
LARGE = 25 << 20  # smallest size with targets, in bytes
COPIES, COPY_BYTES = 20, 64 << 20  # copies in a turn, and bytes of a copy


@dataclass
class Contestant:
    """One way to average.

    Attributes:
        tensor: tensor to average. In the check its elements are r + 1 on rank r.
        run: one call, which returns when the device has finished.
    """

    tensor: torch.Tensor
    run: Callable[[], object]

    @torch.no_grad()
    def is_right(self, participants: Participants) -> bool:
        """Check one call. It must keep the sum over the ranks and, with two ranks, give both the mean. Collective."""
        self.tensor.fill_(participants.rank + 1)
        self.run()
        total = hvd.allreduce(self.tensor, op=hvd.Sum, name="bench.total")
        mean = (participants.size + 1) / 2
        right = bool((total == mean * participants.size).all()) and (
            participants.size > 2 or bool((self.tensor == mean).all())
        )
        return bool(participants.maximum(np.array([float(not right)]))[0] == 0)


def _allreduce(name: str, tensor: torch.Tensor, place: Place) -> Contestant:
    def run() -> None:
        hvd.allreduce_(tensor, name=name, op=hvd.Average)
        place.finish()

    return Contestant(tensor, run)


def _gossip(count: int, place: Place) -> Contestant:
    parameter = torch.nn.Parameter(torch.zeros(count, device=place.device))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), [("p", parameter)], algorithm=Crossover(segments="model")
    )

    def run() -> None:
        with optimizer.skip_synchronize():
            optimizer.step()
        place.finish()

    return Contestant(parameter, run)


def _by_hand(name: str, tensor: torch.Tensor, place: Place, participants: Participants, mpi: bool) -> Contestant:
    """Return the contestant that averages as Horovod does without NCCL."""
    host = torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    buffer = host.numpy()

    def run() -> None:
        host.copy_(tensor, non_blocking=True)
        place.finish()
        if mpi:
            from mpi4py import MPI

            participants.communicator.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)
        else:
            hvd.allreduce_(host, name=name, op=hvd.Average)
        tensor.copy_(host, non_blocking=True)
        if mpi:
            tensor.div_(participants.size)
        place.finish()

    return Contestant(tensor, run)


def slices(place: Place, participants: Participants, size: int = COPY_BYTES) -> Results:
    """Time copies on the device, in seconds: on one rank while the others idle, and on all at once. Collective."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    place.turn(copy, COPIES)
    alone = np.zeros(1)
    for rank in range(participants.size):
        participants.barrier()
        if rank == participants.rank:
            alone[0] = place.turn(copy, COPIES)[0]
    participants.barrier()
    together = float(participants.maximum(np.array([place.turn(copy, COPIES)[0]]))[0])
    slowest = float(participants.maximum(alone)[0])
    return {"bytes": size, "alone": slowest, "together": together, "ratio": together / slowest}


def measure(size: int, place: Place, participants: Participants, budget: float) -> Results:
    """Time and check each contestant in the current world on `size` bytes. Note the routes it takes. Collective."""
    count, name = size // 4, f"bench.{size}"
    contestants = {
        "arena": _allreduce(f"{name}.arena", hvd.shared_empty(count, dtype=torch.float32, device=place.device), place),
        "fresh": _allreduce(f"{name}.fresh", torch.zeros(count, device=place.device), place),
        "gossip": _gossip(count, place),
        "by hand": _by_hand(f"{name}.hand", torch.zeros(count, device=place.device), place, participants, False),
    }
    if participants.communicator is not None:
        contestants["mpi"] = _by_hand("", torch.zeros(count, device=place.device), place, participants, True)
    entries: Results = {}
    for key, one in contestants.items():
        right = one.is_right(participants)
        with torch.no_grad():
            one.tensor.fill_(1.5)  # averages of equal numbers do not change
        before = dict(current().world.gpu_operations)
        one.run()
        taken = [way for way, times in current().world.gpu_operations.items() if times > before.get(way, 0)]
        entries[key] = {"right": right, "ways": sorted(taken)}
    samples = race({key: one.run for key, one in contestants.items()}, participants, budget)
    for key in contestants:
        entries[key] |= samples[key].summary()
    return entries


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the targets: time by hand over ours is at least 1, and through the host at least 0.9."""
    entries = []
    for row in rows:
        if row["bytes"] < LARGE:
            continue
        for route, limit in (("default", 1.0), ("host", 0.9)):
            for key in OURS:
                found = row["routes"].get(route)
                value = None if found is None else verdicts.ratio({"contestants": found}, "by hand", key)
                how = "" if route == "default" else ", through the host"
                what = f"{format_bytes(row['bytes'])}: {key}{how}: time by hand over ours"
                entries.append(verdicts.target(what, value, limit, at_least=True))
    return entries


def wrong(rows: Sequence[Results]) -> list[str]:
    """Return the contestants with wrong results."""
    return [
        f"{key} at {format_bytes(row['bytes'])} ({route})"
        for row in rows
        for route, found in row["routes"].items()
        for key, one in found.items()
        if not one["right"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 1 if a result is wrong, 2 if there is one rank. Raise NotBuilt without a GPU."""
    options = command_line.parser("gpu_ranks", __doc__, 8.0, "size and route")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"bytes of a tensor (default {SIZES})")
    places.add_option(options)
    chosen = options.parse_args(argv)
    budget = 0.5 if chosen.quick else chosen.budget
    if chosen.pretend:
        chosen.quick, chosen.sizes, budget = True, "4KiB", 0.01
    sizes = [command_line.parse_bytes(text) for text in chosen.sizes.split(",")]
    places.find("gpu_ranks", chosen.pretend)
    torch.set_num_threads(1)
    rows: list[Results] = [{"bytes": size, "routes": {}} for size in sizes]
    found_machine = watch = None
    sharing: Results = {}
    participants = Participants()
    for route, value in ROUTES.items():
        os.environ["SORDINO_GPU_ROUTE"] = value
        participants, library = baselines.start()
        if participants.size == 1:
            records.log(
                "gpu_ranks: averaging needs at least two ranks: sordino run -np 2 -- python benchmarks/gpu_ranks.py"
            )
            hvd.shutdown()
            return 2
        place = places.find("gpu_ranks", chosen.pretend, hvd.local_rank())
        places.enter(place)
        if watch is None or found_machine is None:
            found_machine, watch = machines.machine(library), Watch(participants)
            sharing = slices(place, participants, 64 << 10 if chosen.pretend else COPY_BYTES)
        for row in rows:
            row["routes"][route] = measure(row["bytes"], place, participants, budget)
            if participants.rank == 0:
                times = [f"{key} {format_seconds(one['median'])}" for key, one in row["routes"][route].items()]
                records.log(f"{format_bytes(row['bytes']):>8}, {route}: {', '.join(times)}")
        if route == list(ROUTES)[-1]:
            found_machine["others"] = watch.others()
        hvd.shutdown()
    if participants.rank == 0:
        results: Results = {
            "benchmark": "gpu_ranks",
            "name": f"gpu_ranks_np{participants.size}",
            "machine": found_machine,
            "device": place.name,
            "gpus": min(torch.cuda.device_count(), participants.size) if place.on_gpu else 1,
            "slices": sharing,
            "cuda": build_info()["cuda"],
            "ranks": participants.size,
            "rows": rows,
            "wrong": wrong(rows),
            "targets": [] if chosen.pretend else targets(rows),
        }
        records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
