"""Ranks as threads that carry out a test's orders step by step, and a float64 model of the values that they must
reach."""

from __future__ import annotations

import faulthandler
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import sordino.torch as hvd
from sordino import sim
from sordino._core import SimNetwork
from sordino.algorithms import Algorithm
from sordino.errors import Evicted, NoQuorum
from sordino.runtime.context import Context, use

RATE, MOMENTUM = 0.1, 0.5
SIZES = (3, 5, 2)  # of a small network's layers
PATIENCE_S = 100


def parameters() -> list[torch.nn.Parameter]:
    """Return the same parameters on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in ((SIZES[1], SIZES[0]), (SIZES[1],), (SIZES[2], SIZES[1]), (SIZES[2],))
    ]


def loss(values: list[torch.Tensor], identity: int, step: int) -> torch.Tensor:
    """Return the loss of the batch that a rank has in a step."""
    generator = torch.Generator().manual_seed(1000 * identity + step)
    x = torch.randn(4, SIZES[0], generator=generator, dtype=torch.float64)
    first, bias, second, last = values
    return ((torch.relu(x @ first.T + bias) @ second.T + last) ** 2).mean()


@dataclass
class Reference:
    """Model of all-reduce in one process. If a step may have been taken with a lost rank or without it, the model
    follows both cases until the ranks show which one it was."""

    futures: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        values = [parameter.detach().clone() for parameter in parameters()]
        self.futures = [(values, [torch.zeros_like(value) for value in values])]

    def step(self, step: int, possible: Iterable[frozenset[int]]) -> None:
        """Take one step, with the gradients of any one of these sets of ranks."""
        self.futures = [self._after(*future, step, who) for future in self.futures for who in possible]

    @staticmethod
    def _after(
        values: list[torch.Tensor], momenta: list[torch.Tensor], step: int, who: frozenset[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        totals = [torch.zeros_like(value) for value in values]
        for identity in who:
            leaves = [value.clone().requires_grad_() for value in values]
            for total, grad in zip(totals, torch.autograd.grad(loss(leaves, identity, step), leaves)):
                total += grad / len(who)
        momenta = [momentum * MOMENTUM + total for momentum, total in zip(momenta, totals)]
        return [value - RATE * momentum for value, momentum in zip(values, momenta)], momenta

    def match(self, seen: list[torch.Tensor]) -> bool:
        """Return whether these values are one of the possible models; from now on it is the only one."""
        self.futures = [
            future
            for future in self.futures
            if all(torch.allclose(mine, value, rtol=1e-9, atol=1e-12) for mine, value in zip(seen, future[0]))
        ][:1]
        return bool(self.futures)


class Member(threading.Thread):
    """One rank: it carries out its orders until one tells it to leave, or until it cannot continue."""

    def __init__(
        self, context: Context, algorithm: Algorithm | str | None, check_finite: bool, compression: Any
    ) -> None:
        super().__init__(name=f"rank-{context.rank}", daemon=True)
        self.identity, self.context = context.rank, context
        self.algorithm, self.check_finite, self.compression = algorithm, check_finite, compression
        self.orders: queue.Queue[Callable[[Member], Any] | None] = queue.Queue()
        self.answers: queue.Queue[Any] = queue.Queue()
        self.ended: BaseException | None = None
        self.steps = 0

    def run(self) -> None:
        with use(self.context):
            try:
                self.parameters = parameters()
                sgd = torch.optim.SGD(self.parameters, lr=RATE, momentum=MOMENTUM)
                self.optimizer = hvd.DistributedOptimizer(
                    sgd, compression=self.compression, algorithm=self.algorithm, check_finite=self.check_finite
                )
                while (order := self.orders.get()) is not None:
                    self.answers.put(order(self))
            except BaseException as error:
                self.ended = error
                if not isinstance(error, (Evicted, NoQuorum)):
                    self.context.abort(f"{type(error).__name__}: {error}")
            finally:
                self.context.shutdown()
                self.answers.put(None)

    def step(self) -> None:
        self.backward()
        self.finish_step()

    def train(self) -> int:
        """Take three steps; return the number of all steps."""
        for _ in range(3):
            self.step()
        return self.steps

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss(list(self.parameters), self.identity, self.steps).backward()

    def finish_step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def values(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


class Crew:
    """All ranks of a job.

    Args:
        size: number of ranks.
        algorithm: algorithm of their optimizers.
        per_node: ranks of each node; 0 is all.
        check_finite, compression: as in `DistributedOptimizer`.
    """

    def __init__(
        self,
        size: int,
        algorithm: Algorithm | str | None = None,
        per_node: int = 0,
        check_finite: bool = False,
        compression: Any = hvd.Compression.none,
    ) -> None:
        self.network = SimNetwork([rank // per_node if per_node else 0 for rank in range(size)])
        contexts = sim._contexts(self.network, (), True)
        self.members = [Member(context, algorithm, check_finite, compression) for context in contexts]
        for member in self.members:
            member.start()
        self.living = list(self.members)

    def order(self, what: Callable[[Member], Any]) -> None:
        """Give an order to all living ranks, and do not wait for it."""
        for member in self.living:
            member.orders.put(what)

    def collect(self) -> dict[int, Any]:
        """Return the answers of the living ranks; ranks that ended meanwhile no longer count as living."""
        answers = {}
        for member in self.living:
            try:
                answers[member.identity] = member.answers.get(timeout=PATIENCE_S)
            except queue.Empty:
                faulthandler.dump_traceback()
                where = [
                    f"rank {one.identity}: step {one.steps}, {one.context.epoch=}, {one.context.world.failed=}"
                    for one in self.members
                    if one.is_alive()
                ]
                silent = f"rank {member.identity} does not answer for {PATIENCE_S} s"
                raise AssertionError("; ".join([silent, *where])) from None
        self.living = [member for member in self.living if member.ended is None]
        return {member.identity: answers[member.identity] for member in self.living}

    def all(self, what: Callable[[Member], Any]) -> dict[int, Any]:
        """Give an order to all living ranks, and wait for their answers."""
        self.order(what)
        return self.collect()

    def settle(self) -> dict[int, Any]:
        """Return the living ranks' answers after some ranks may have been killed. Then all ranks call `metric`: there,
        a rank that does not know yet that all have their results meets the others. A second call notices a victim that
        had completed the first one."""
        self.order(metric)
        answers = self.collect()
        time.sleep(0.002)
        self.collect()
        self.all(metric)
        return answers

    def end(self) -> None:
        """Make all ranks leave."""
        for member in self.members:
            member.orders.put(None)
        for member in self.members:
            member.join(PATIENCE_S)
            assert not member.is_alive(), f"rank {member.identity} does not end"


MakeCrew = Callable[..., Crew]


def subsets(sure: frozenset[int], unsure: Iterable[int]) -> list[frozenset[int]]:
    """Return the sets that have all of `sure` and some of `unsure`."""
    rest = list(unsure)
    return [sure | frozenset(some) for count in range(len(rest) + 1) for some in itertools.combinations(rest, count)]


def metric(member: Member) -> tuple[int, int, float]:
    """Call two operations, as a training loop does. Return the number of ranks in each, and the sum of their
    identities."""
    total = hvd.allreduce(torch.tensor([1.0, float(member.identity)], dtype=torch.float64), op=hvd.Sum)
    gathered: list[int] = hvd.allgather_object(member.identity)
    return int(total[0]), len(gathered), float(total[1])
