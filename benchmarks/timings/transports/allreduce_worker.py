"""One rank of a job that all-reduces with one contestant. Other communication libraries are not imported.

Started by timings.transports.allreduce; rank 0 prints the slowest rank's seconds as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sordino.timing import Participants, Seconds, time_block

_WARMUP = 3
_LEAST, _MOST = 3, 2000  # number of runs of one size


@dataclass
class Contestant:
    """A library that all-reduces tensors.

    Attributes:
        participants: the ranks, with the contestant's barrier and maximum.
        empty: function that returns a vector of `count` float32 in memory that suits the contestant best.
        ready: function that prepares to reduce a vector in place, and returns a function that reduces it.
        close: function that shuts the contestant down.
        transport: transport between hosts.
        averages: whether the result is the average, not the sum.
        reduces: whether there is a result. The floor has none.
    """

    participants: Participants
    empty: Callable[[int], torch.Tensor]
    ready: Callable[[torch.Tensor], Callable[[], object]]
    close: Callable[[], object]
    transport: str
    averages: bool = True
    reduces: bool = True


def _sordino() -> Contestant:
    import sordino.torch as hvd

    hvd.init()

    def ready(tensor: torch.Tensor) -> Callable[[], object]:
        name = f"bench.{tensor.numel()}"
        return lambda: hvd.allreduce_(tensor, name=name, op=hvd.Average)

    def empty(count: int) -> torch.Tensor:
        return hvd.shared_empty(count, dtype=torch.float32)

    return Contestant(Participants(hvd.rank(), hvd.size()), empty, ready, hvd.shutdown, hvd.transport())


def _ordinary() -> Contestant:
    return replace(_sordino(), empty=torch.empty)


def _floor() -> Contestant:
    """Return the contestant that reads and writes one rank's share of all tensors, as an average in place must."""
    from sordino.bench.contestants.libraries import averaging_alone

    found = _sordino()
    size = found.participants.size
    return replace(found, empty=torch.empty, ready=lambda tensor: averaging_alone(tensor.numel(), size), reduces=False)


def _mpi() -> Contestant:
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def ready(tensor: torch.Tensor) -> Callable[[], object]:
        buffer = tensor.numpy()
        return lambda: world.Allreduce(MPI.IN_PLACE, buffer, op=MPI.SUM)

    participants = Participants(world.rank, world.size, world)
    return Contestant(participants, torch.empty, ready, _nothing, "mpi", averages=False)


class _GlooParticipants(Participants):
    """Participants that use torch.distributed."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier()

    def maximum(self, values: Seconds) -> Seconds:
        """Return the element-wise maximum over the ranks."""
        result = torch.from_numpy(values.copy())
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
        return np.asarray(result.numpy())


def _gloo() -> Contestant:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo")
    participants = _GlooParticipants(distributed.get_rank(), distributed.get_world_size())

    def ready(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: (distributed.all_reduce(tensor), tensor.div_(participants.size))

    return Contestant(participants, torch.empty, ready, distributed.destroy_process_group, "gloo")


CONTESTANTS = {"sordino": _sordino, "ordinary": _ordinary, "floor": _floor, "mpi": _mpi, "gloo": _gloo}


def _nothing() -> None:
    """Do nothing, because MPI ends at exit."""


def measure(contestant: Contestant, size: int, budget: float) -> dict[str, Any]:
    """Return the seconds of all-reduces of `size` bytes, and whether the result is right. Collective."""
    participants = contestant.participants
    tensor = contestant.empty(size // 4)
    run = contestant.ready(tensor)
    tensor.fill_(participants.rank + 1)
    run()
    expected = (participants.size + 1) / 2 * (1 if contestant.averages else participants.size)
    wrong = float(contestant.reduces and not bool((tensor == expected).all()))
    right = bool(participants.maximum(np.array([wrong]))[0] == 0)
    tensor.zero_()  # sums of zeros do not grow
    estimate = float(np.median(participants.maximum(time_block(run, participants, _WARMUP))))
    count = int(np.clip(budget / estimate, _LEAST, _MOST))
    seconds = participants.maximum(time_block(run, participants, count))
    return {"bytes": size, "seconds": seconds.tolist(), "right": right}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print on rank 0."""
    options = argparse.ArgumentParser(prog="allreduce_worker", description=__doc__)
    options.add_argument("--by", choices=CONTESTANTS, required=True)
    options.add_argument("--sizes", required=True)
    options.add_argument("--budget", type=float, required=True)
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    contestant = CONTESTANTS[chosen.by]()
    rows = [measure(contestant, int(size), chosen.budget) for size in chosen.sizes.split(",")]
    if contestant.participants.rank == 0:
        print(json.dumps({"transport": contestant.transport, "rows": rows}), flush=True)
    # Let the last messages leave before any rank ends.
    contestant.participants.barrier()
    time.sleep(0.1)
    contestant.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
