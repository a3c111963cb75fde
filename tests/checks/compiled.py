"""torch.compile'd models. Dynamo is not made for several threads, so these run under MPI, and on one thread."""

from __future__ import annotations

import threading

import torch

import sordino.torch as hvd
from checks.registry import Seat, check
from checks.training import Twins

ONE_AT_A_TIME = threading.Lock()


def train_compiled(seat: Seat, kind: str, backend: str) -> None:
    twins = Twins(seat, kind)
    plain = twins.model
    with ONE_AT_A_TIME:
        twins.model = torch.compile(plain, backend=backend)
    twins.train(3)
    twins.train(2, set_to_none=False)
    twins.model = plain
    twins.check(1e-9)


@check(on=("mpi",), kind=("small", "tied", "conv"))
def eager_backend(seat: Seat, kind: str) -> None:
    train_compiled(seat, kind, "eager")


@check(on=("mpi",))
def aot_eager_backend(seat: Seat) -> None:
    train_compiled(seat, "small", "aot_eager")


@check(on=("mpi",))
def a_compiled_step_with_collectives_inside(seat: Seat) -> None:
    """Collectives break the graph, and work."""

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x * 2, op=hvd.Sum) + 1

    for _ in range(2):
        assert step(torch.ones(3)).tolist() == [2 * seat.size + 1] * 3
