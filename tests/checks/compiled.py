"""Models compiled by torch.compile. Dynamo does not support several threads, so these checks run under MPI or on one
thread. test_compiled.py has the checks with torch's default compiler, which takes long to compile C++."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch._dynamo.testing import CompileCounterWithBackend

import sordino.torch as hvd
from checks.models import loss_of
from checks.reference import values
from checks.registry import Seat, check
from checks.training import Twins

ONE_AT_A_TIME = threading.Lock()
FORKS = ("mpi-2", "mpi-3")  # forks have imported Dynamo; a real process needs seconds for it


def train_compiled(seat: Seat, kind: str, backend: str) -> None:
    twins = Twins(seat, kind)
    plain = twins.model
    with ONE_AT_A_TIME:
        twins.model = torch.compile(plain, backend=backend)
    twins.train(3)
    twins.train(2, set_to_none=False)
    twins.model = plain
    twins.check(1e-9)


@check(on=("processes",), quick=FORKS, kind=("small", "tied", "conv"))
def eager_backend(seat: Seat, kind: str) -> None:
    train_compiled(seat, kind, "eager")


@check(on=("processes",), quick=FORKS)
def aot_eager_backend(seat: Seat) -> None:
    train_compiled(seat, "small", "aot_eager")


@check(on=("processes",), quick=FORKS)
def sync_batch_norm_in_a_compiled_model(seat: Seat) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), hvd.SyncBatchNorm(3)).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    x = values(seat.rank, (4, 2), torch.float64)
    wanted = model(x)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), wanted)


@check(on=("processes",), quick=FORKS)
def compiled_autograd(seat: Seat) -> None:
    """Gradients are reduced when all known ones are ready. In the first step, step() reduces them, as no end of
    backward is seen."""
    twins = Twins(seat, "matrices")  # a model with few hooks, as Dynamo takes long to trace each
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


# ---- collectives inside compiled code --------------------------------------------------------------------------------

Function = Callable[[torch.Tensor, Any], torch.Tensor]

COLLECTIVES: dict[str, Function] = {
    "allreduce": lambda x, _: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, name="named"),
    "compressed": lambda x, _: hvd.allreduce(x, compression=hvd.Compression.bf16),
    "max": lambda x, _: hvd.allreduce(x, op=hvd.Max),
    "grouped allreduce": lambda x, _: torch.cat(hvd.grouped_allreduce([x, 2 * x])),
    "allgather": lambda x, _: hvd.allgather(x[: hvd.rank() + 1]),
    "grouped allgather": lambda x, _: torch.cat(hvd.grouped_allgather([x, 3 * x])),
    "allgather of scalars": lambda x, _: hvd.allgather(x.sum()),
    "broadcast": lambda x, _: hvd.broadcast(x, 0),
    "reducescatter": lambda x, _: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5),
    "grouped reducescatter": lambda x, _: torch.cat(hvd.grouped_reducescatter([x, 3 * x])),
    "alltoall": lambda x, _: hvd.alltoall(x[: 2 * hvd.size()]),
    "alltoall of some rows": lambda x, _: hvd.alltoall(x, splits=[hvd.rank() + 1] + [1] * (hvd.size() - 1))[0],
    "process set": lambda x, alone: hvd.allreduce(x, op=hvd.Sum, process_set=alone),
}


def in_one_graph(seat: Seat, backend: str) -> None:
    """Results and gradients are those of eager code, and one graph serves all sizes."""
    sets = [hvd.add_process_set([rank]) for rank in range(seat.size)] if seat.size > 1 else [hvd.global_process_set]
    alone = sets[seat.rank]

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        results = [collective(x * 2, alone) + 1 for collective in COLLECTIVES.values()]
        weighted = [(number + seat.rank) * y.square().sum() for number, y in enumerate(results, 1)]
        return torch.stack(weighted).sum(), results

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    compilations = []
    for more in (3, 5, 6):
        x = values(seat.rank, (2 * seat.size + more, 4), torch.float64).requires_grad_()
        twin = x.detach().clone().requires_grad_()
        (wanted, results), (found, others) = loss(x), compiled(twin)
        wanted.backward()
        found.backward()
        for name, result, other in zip(COLLECTIVES, results, others, strict=True):
            torch.testing.assert_close(other, result, msg=f"{name}: {other} {result}")
        torch.testing.assert_close(twin.grad, x.grad)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1, compilations
    for process_set in sets:
        hvd.remove_process_set(process_set)


@check(on=("processes",), quick=FORKS)
def collectives_in_one_graph(seat: Seat) -> None:
    in_one_graph(seat, "aot_eager")


@check(on=("processes",), quick=FORKS)
def ranks_compile_at_different_times(seat: Seat) -> None:
    """The names of operations do not depend on the number of compilations, or on whether a rank compiles at all."""
    torch._dynamo.reset()

    def step(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce(x + own.sum(), op=hvd.Sum) + hvd.allreduce(x, op=hvd.Max)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    for turn in range(6):
        if turn == 3 and seat.rank == 0:
            compiled = step
        own = torch.ones(turn + 1 if seat.rank == seat.last else 1)
        wanted = seat.size + (seat.size - 1 + turn + 1) + 1
        assert compiled(torch.ones(3), own).tolist() == [wanted] * 3


@check(on=("processes",), quick=FORKS)
def unused_results_stay_in_the_graph(seat: Seat) -> None:
    """A rank takes part in an operation whose result it does not use, because others use it."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, largest = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x * hvd.rank(), op=hvd.Max)
        return (total if hvd.rank() == 0 else x), hvd.allreduce(largest, op=hvd.Average)

    for _ in range(3):
        mine, everyones = step(torch.ones(2))
        assert mine.tolist() == [seat.size if seat.rank == 0 else 1.0] * 2
        assert everyones.tolist() == [float(seat.last)] * 2


@check(on=("processes",), quick=FORKS)
def errors_of_compiled_collectives(seat: Seat) -> None:
    cases: dict[str, Callable[[torch.Tensor], Any]] = {
        "unknown reduction": lambda x: hvd.allreduce(x, op=9),
        "not registered": lambda x: hvd.allreduce(x, process_set=hvd.ProcessSet([0])),
        "scalar inputs": lambda x: hvd.reducescatter(x.sum()),
    }
    for text, wrong in cases.items():
        with pytest.raises(Exception, match=text):
            torch.compile(wrong, backend="aot_eager", fullgraph=True)(torch.ones(3))
