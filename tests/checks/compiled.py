"""Models compiled by torch.compile. Dynamo does not support several threads, so these checks run under MPI or on one
thread."""

from __future__ import annotations

import threading
import warnings

import torch
import torch._dynamo.compiled_autograd

import sordino.torch as hvd
from checks.models import loss_of
from checks.reference import values
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


@check(on=("processes",), kind=("small", "tied", "conv"))
def eager_backend(seat: Seat, kind: str) -> None:
    train_compiled(seat, kind, "eager")


@check(on=("processes",))
def aot_eager_backend(seat: Seat) -> None:
    train_compiled(seat, "small", "aot_eager")


@check(on=("processes",))
def inductor_backend(seat: Seat) -> None:
    """Runs where a C++ compiler works, as on every machine that built Sordino. Elsewhere torch itself reports the
    error."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(3))
    except Exception as error:
        works = False
        print(f"inductor does not work here: {error}")
    else:
        works = True
    if all(hvd.allgather_object(works)):
        train_compiled(seat, "small", "inductor")


@check(on=("processes",))
def sync_batch_norm_in_a_compiled_model(seat: Seat) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), hvd.SyncBatchNorm(3)).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    x = values(seat.rank, (4, 2), torch.float64)
    wanted = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), wanted)


@check(on=("processes",))
def a_compiled_step_with_collectives_inside(seat: Seat) -> None:
    """Collectives break the graph, and work."""

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x * 2, op=hvd.Sum) + 1

    for _ in range(2):
        assert step(torch.ones(3)).tolist() == [2 * seat.size + 1] * 3


@check(on=("processes",))
def compiled_autograd(seat: Seat) -> None:
    """Gradients are reduced when all known ones are ready. In the first step, step() reduces them, as no end of
    backward is seen."""
    twins = Twins(seat)
    for turn in range(4):
        twins.zero(set_to_none=turn < 2)
        mine, whole = twins.batches()
        loss = loss_of(twins.model, *mine)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo warns of each hook that it does not trace
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                loss.backward()
        loss_of(twins.twin, *whole).backward()
        assert twins.optimizer.gradients_ready() == (turn > 0 or seat.size == 1)
        if turn:
            twins.check_gradients()
        twins.step()
    twins.check(1e-9)
