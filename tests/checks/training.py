"""Helpers to train on this rank's part of each batch and, for comparison, in one process on the whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import sordino.torch as hvd
from checks.models import batch, loss_of, make_model, part
from checks.registry import Seat

Make = Callable[[nn.Module], torch.optim.Optimizer]
ROWS = 4  # per rank


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Twins:
    """A model that all ranks train through a wrapper, and its twin that each rank trains alone on the whole batch."""

    def __init__(
        self, seat: Seat, kind: str = "small", make: Make = sgd, dtype: torch.dtype = torch.float64, **options: object
    ):
        self.seat, self.dtype = seat, dtype
        self.model, self.twin = make_model(kind, 3, dtype), make_model(kind, 3, dtype)
        self.plain = make(self.model)
        options.setdefault("named_parameters", self.model.named_parameters())
        self.optimizer = hvd.DistributedOptimizer(self.plain, **options)
        self.reference = make(self.twin)
        self.turn = 0
        self.start = [parameter.detach().clone() for parameter in self.model.parameters()]

    def batches(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this rank's part of the next batch, and the whole batch."""
        self.turn += 1
        whole = batch(ROWS * self.seat.size, self.turn, self.dtype)
        return part(whole, self.seat.rank, self.seat.size), list(whole)

    def backward(self, *arguments: object) -> None:
        mine, whole = self.batches()
        loss_of(self.model, *mine, *arguments).backward()
        loss_of(self.twin, *whole, *arguments).backward()

    def zero(self, *arguments: object, **options: object) -> None:
        self.optimizer.zero_grad(*arguments, **options)
        self.reference.zero_grad(*arguments, **options)

    def step(self) -> None:
        self.optimizer.step()
        self.reference.step()

    def train(self, steps: int, *arguments: object, set_to_none: bool = True) -> None:
        for _ in range(steps):
            self.zero(set_to_none=set_to_none)
            self.backward(*arguments)
            self.step()

    def check(self, slack: float = 1e-11) -> None:
        """Check that the twins agree, that all ranks are equal bit for bit, and that the training changed something."""
        for (name, mine), wanted in zip(self.model.named_parameters(), self.twin.parameters()):
            torch.testing.assert_close(
                mine, wanted, atol=slack, rtol=slack, msg=lambda text, name=name: f"{name}: {text}"
            )
            self.seat.same(name, mine)
        assert any(not torch.equal(before, now) for before, now in zip(self.start, self.model.parameters()))

    def check_gradients(self, slack: float = 1e-12) -> None:
        for (name, mine), wanted in zip(self.model.named_parameters(), self.twin.parameters()):
            if wanted.grad is None:
                assert mine.grad is None, f"{name} has a gradient"
            else:
                assert mine.grad is not None, f"{name} has no gradient"
                torch.testing.assert_close(mine.grad, wanted.grad, atol=slack, rtol=slack)
                self.seat.same(f"gradient of {name}", mine.grad)
