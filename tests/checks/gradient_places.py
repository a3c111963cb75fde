"""Memory of gradients between backward and step, and references to gradients of earlier steps that must stay valid."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino.errors import StepOrderError
from sordino.runtime.context import current
from sordino.runtime.gradients.deferred_step import Watch

# Objects by which a user may keep a gradient.
KEEPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "part": lambda grad: grad.view(-1)[1:],
    "memory": lambda grad: grad.untyped_storage(),
}


def values_of(kept: Any) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept.flatten()
    return torch.frombuffer(memoryview(bytes(kept.tolist())), dtype=torch.float32)


class Job:
    """Model whose gradients all equal the step number plus the rank, so that averages are known."""

    def __init__(self, seat: Seat, tensors: int = 3, length: int = 5) -> None:
        self.seat = seat
        self.parameters = [nn.Parameter(torch.zeros(length)) for _ in range(tensors)]
        named = [(f"p{i}", parameter) for i, parameter in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=0.0), named)

    def step(self, number: int, set_to_none: bool = True) -> float:
        """Take a step and return the value of all gradients."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        total = torch.stack([parameter.sum() for parameter in self.parameters]).sum()
        (total * (self.seat.rank + number)).backward()
        self.optimizer.step()
        mean = (self.seat.size - 1) / 2 + number
        for parameter in self.parameters:
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean))
        return mean


@check(what=tuple(KEEPING), whose=("one rank", "all"), least=2)
def gradients_of_earlier_steps_stay(seat: Seat, what: str, whose: str) -> None:
    """A gradient that a user keeps when zero_grad() replaces it is not overwritten.

    Gradients that persist for several steps have moved to memory that the node shares.
    """
    for pattern in ("TTTTT", "FFFTFFFTFF"):
        job = Job(seat)
        kept: list[tuple[float, Any]] = []
        for number, (letter, after) in enumerate(zip(pattern, pattern[1:] + "F")):
            mean = job.step(number, set_to_none=letter == "T")
            if after == "T" and (whose == "all" or seat.rank == seat.last):
                for parameter in job.parameters[:: 1 + number % 2]:
                    assert parameter.grad is not None
                    kept.append((mean, KEEPING[what](parameter.grad)))
            for then, one in kept:
                assert bool((values_of(one) == then).all()), (pattern, number, then)
            seat.same(f"{pattern} {number}", job.parameters[0].grad)


@check(least=2)
def gradients_that_persist_move_once(seat: Seat) -> None:
    """Gradients that persist move once, into memory that the node shares."""
    job = Job(seat)
    found = []
    for number in range(6):
        job.step(number, set_to_none=False)
        if number > 1:
            found.append([parameter.grad for parameter in job.parameters])
    assert all(grad is last for grads in found for grad, last in zip(grads, found[-1]))
    world = current().world
    if world.shares_memory and current().host_device is None:
        for grad in found[-1]:
            assert grad is not None
            assert world.in_shared_memory(grad.data_ptr(), grad.nbytes)


@check(least=2, whose=("one rank", "all"), of=("a flat buffer", "a list"))
def gradients_of_the_script_stay(seat: Seat, whose: str, of: str) -> None:
    """Gradients that the script clears by its own references do not move: views of a flat buffer, or a list of them."""
    job = Job(seat)
    kept: list[torch.Tensor] = []
    for number in range(6):
        total = torch.stack([parameter.sum() for parameter in job.parameters]).sum()
        (total * (seat.rank + number)).backward()
        for parameter in job.parameters:
            wanted = torch.full_like(parameter, (seat.size - 1) / 2 + number)
            torch.testing.assert_close(parameter.grad, wanted)
        job.optimizer.step()
        if whose == "one rank" and seat.rank != seat.last:
            job.optimizer.zero_grad(set_to_none=False)
            continue
        if number == 0 and of == "a list":
            kept = [parameter.grad for parameter in job.parameters]  # type: ignore[misc]
        elif number == 0:
            kept = [torch.zeros(3, 5)]
            for place, parameter in enumerate(job.parameters):
                parameter.grad = kept[0][place]
        torch._foreach_zero_(kept)


@check(least=2, hoards=(False, True))
def a_model_is_cast_with_its_gradients(seat: Seat, hoards: bool) -> None:
    """After a cast, `.grad` is the same object with other memory. Gradients that are kept stay where backward has put
    them."""
    model = nn.Linear(6, 8)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model.named_parameters())
    hoard = []
    for number in range(7):
        if number == 4:
            model.double()
        optimizer.zero_grad(set_to_none=hoards)
        model(torch.full((1, 6), 1.0 + seat.rank, dtype=model.weight.dtype)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, (seat.size + 1) / 2))
        hoard += [model.weight.grad, model.bias.grad] if hoards else []


@check(least=2)
def added_to_twice_in_one_backward(seat: Seat) -> None:
    """One weight is used in two reentrant checkpoints, so a gradient that was sent may be only half of it."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("weight", weight)])
    loss = torch.ones(3, requires_grad=True)
    for _ in range(2):
        loss = checkpoint(lambda value: value * weight, loss, use_reentrant=True)
    with pytest.raises(StepOrderError, match=r"more than backward_passes_per_step times.*weight"):
        loss.sum().backward()
    optimizer.zero_grad()


@check(least=2)
def reduced_in_the_middle_of_a_backward(seat: Seat) -> None:
    """Gradients that come after a reduction inside backward are reduced when backward ends, together with the reduced
    ones."""
    first, last = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, last], lr=0.0), [("first", first), ("last", last)])
    mean = (seat.size + 1) / 2
    for _ in range(3):
        optimizer.zero_grad()
        between = first + 0.0
        between.register_hook(lambda _: optimizer.synchronize())
        ((between + last + 0.0).sum() * (seat.rank + 1)).backward()
        for parameter in (first, last):
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, mean))
        optimizer.step()


def python_calls(work: Callable[[], Any]) -> int:
    calls = 0

    # An optimizer of an earlier check in this process may still watch for its own parameters. It does not count here.
    others = Watch.__torch_function__.__code__

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is not others

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


@check(least=2, set_to_none=(True, False))
def python_is_called_by_the_bucket(seat: Seat, set_to_none: bool) -> None:
    """The number of Python calls in a step does not grow with the number of tensors.

    A step that a busy machine delays takes the usual path, which describes tensors again. So the smallest of several
    counts is compared.
    """
    calls = []
    for tensors in (4, 64):
        job = Job(seat, tensors)
        counts = []
        for number in range(8):
            job.step(number, set_to_none)
            job.optimizer.zero_grad(set_to_none=set_to_none)
            total = torch.stack([parameter.sum() for parameter in job.parameters]).sum()
            counts.append(python_calls(total.backward) + python_calls(job.optimizer.step))
        calls.append(min(counts))
    assert calls[0] == calls[1], calls
