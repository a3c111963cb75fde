"""DiLoCo: against its formulas in float64, against local SGD, and its state."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.registry import Seat, check
from sordino.algorithms import Crossover, DiLoCo, LocalSGD
from sordino.errors import UsageError
from sordino.runtime.exchange.segments import segment_numbers

Trained = list[tuple[torch.nn.Module, torch.optim.Optimizer]]
Wrap = Callable[[torch.nn.Module], hvd.DistributedOptimizer]


class Layers(torch.nn.Module):
    """Model with six blocks of different sizes, and running statistics."""

    def __init__(self, seed: int = 1, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # not torch's own, which threads share
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5 + i, 6 + i) for i in range(5))
        self.head = torch.nn.Linear(10, 1)
        self.register_buffer("seen", torch.zeros(3))
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(torch.randn(value.shape, generator=generator) / 3)
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.head(inputs)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)


def loss_of(model: torch.nn.Module, worker: int, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + worker)
    inputs = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
    return (model(inputs) - worker).square().mean()


def train(seat: Seat, model: torch.nn.Module, optimizer: torch.optim.Optimizer, turns: range) -> None:
    for turn in turns:
        optimizer.zero_grad()
        loss_of(model, seat.rank, turn).backward()
        optimizer.step()


def group_size(seat: Seat) -> int:
    """Return a group size above 1, if the number of ranks allows one."""
    return seat.size if seat.size % 2 else 2


def train_resumed(seat: Seat, wrap: Wrap, saved: tuple[Any, Any], turns: range, dtype: torch.dtype = torch.float64):
    """Return a model with other weights, and its optimizer, that have loaded the saved states and trained on."""
    model = Layers(seed=9, dtype=dtype)
    optimizer = wrap(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(seat, model, optimizer, turns)
    return model, optimizer


def same_parameters(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


class Reference:
    """All workers on one rank, by the formulas of the papers."""

    def __init__(self, size: int, algorithm: DiLoCo, overlap: int = 0, mix: float = 0.0):
        self.interval, self.nesterov = algorithm.interval, algorithm.nesterov
        self.rate, self.factor = algorithm.outer_lr, algorithm.outer_momentum
        self.parts, self.group = algorithm.fragments, algorithm.group_size
        self.overlap, self.mix = overlap, mix
        self.workers: Trained = [(one := Layers(), sgd(one)) for _ in range(size)]
        self.outer = {name: value.detach().clone() for name, value in Layers().named_parameters()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.outer.items()}
        self.gradients: dict[str, torch.Tensor] = {}  # outer gradients in flight
        sizes = [value.numel() * value.element_size() for value in self.outer.values()]
        numbers = segment_numbers(list(self.outer), sizes, "blocks" if self.parts > 1 else "model")
        self.part = {name: number % self.parts for name, number in zip(self.outer, numbers)}

    def step(self, turn: int) -> None:
        for rank, (model, optimizer) in enumerate(self.workers):
            optimizer.zero_grad()
            loss_of(model, rank, turn).backward()
        for first in range(0, len(self.workers), self.group):
            together = [list(model.parameters()) for model, _ in self.workers[first : first + self.group]]
            for members in zip(*together):
                mean = torch.stack([one.grad for one in members]).mean(0)
                for one in members:
                    one.grad = mean.clone()
        for _, optimizer in self.workers:
            optimizer.step()
        number, rest = divmod(turn + 1, self.interval // self.parts)
        if rest == 0:
            self.begin((number - 1) % self.parts)
        if rest == self.overlap:
            self.outer_step()

    @torch.no_grad()
    def begin(self, part: int) -> None:
        for name, outer in self.outer.items():
            if self.part[name] == part:
                workers = [model.get_parameter(name) for model, _ in self.workers]
                self.gradients[name] = outer - torch.stack(list(workers)).mean(0)

    @torch.no_grad()
    def outer_step(self) -> None:
        for name, gradient in self.gradients.items():
            outer = self.outer[name]
            buffer = self.momentum[name].mul_(self.factor).add_(gradient)
            outer -= self.rate * (gradient + self.factor * buffer if self.nesterov else buffer)
            for model, _ in self.workers:
                worker = model.get_parameter(name)
                worker.copy_(self.mix * worker + (1 - self.mix) * outer)
        self.gradients = {}

    def compare(self, seat: Seat, model: torch.nn.Module, optimizer: hvd.DistributedOptimizer) -> None:
        """Compare this rank's own parameters, and the outer parameters."""
        for name, value in model.named_parameters():
            wanted = self.workers[seat.rank][0].get_parameter(name)
            torch.testing.assert_close(value, wanted, atol=1e-12, rtol=1e-11)
        with optimizer.outer_parameters():
            for name, value in model.named_parameters():
                torch.testing.assert_close(value, self.outer[name], atol=1e-12, rtol=1e-11)
                seat.same("outer", value)


@check(nesterov=(True, False), shape=((4, 1), (6, 3), (4, 2), (1, 1)), grouped=(False, True))
def formulas(seat: Seat, nesterov: bool, shape: tuple[int, int], grouped: bool) -> None:
    interval, parts = shape
    given = {"outer_lr": 0.7, "outer_momentum": 0.9, "nesterov": nesterov, "fragments": parts}
    algorithm = DiLoCo(interval=interval, group_size=group_size(seat) if grouped else 1, **given)
    model = Layers()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    reference = Reference(seat.size, algorithm)
    for turn in range(2 * interval + 1):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
        if seat.size == 1:  # a rank alone has no outer step
            return
        reference.compare(seat, model, optimizer)


@check(least=2)
def every_step_with_rate_one_is_averaging(seat: Seat) -> None:
    """The parameters are those of averaging, bit for bit, in float32."""
    models = [Layers(dtype=torch.float32) for _ in range(2)]
    averaging = LocalSGD(interval=1, exchange="allreduce")
    for model, algorithm in zip(models, (averaging, DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0))):
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
        train(seat, model, optimizer, range(4))
    for one, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(one, other)


@check(least=2)
def ranks_that_start_from_different_weights(seat: Seat) -> None:
    """The first rank's weights count, as if they had been broadcast."""
    model = Layers(seed=seat.rank + 1)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=DiLoCo(interval=3))
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    for mine, wanted in zip(model.parameters(), Layers(seed=1).parameters()):
        assert torch.equal(mine, wanted)


@check(least=2, fragments=(1, 2))
def a_checkpoint_has_the_outer_state(seat: Seat, fragments: int) -> None:
    """Training that resumes in the middle of an interval is the same, bit for bit; without the momentum it is not."""
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, fragments=fragments)

    def wrapped(model: torch.nn.Module) -> hvd.DistributedOptimizer:
        return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)

    model = Layers()
    optimizer = wrapped(model)
    train(seat, model, optimizer, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert saved[1]["sordino"].keys() == {"algorithm", "steps", "round", "parameters", "outer", "momentum"}
    for values in (*saved[1]["sordino"]["outer"], *saved[1]["sordino"]["momentum"]):
        seat.same("outer state", values)
    train(seat, model, optimizer, range(6, 12))
    forgetful = copy.deepcopy(saved)
    for values in forgetful[1]["sordino"]["momentum"]:
        values.zero_()
    for state, same in ((saved, True), (forgetful, False)):
        other, _ = train_resumed(seat, wrapped, state, range(6, 12))
        assert same_parameters(model, other) == same


@check(least=2, overlap=(0, 2))
def a_checkpoint_of_the_beginning_begins_anew(seat: Seat, overlap: int) -> None:
    """The checkpoint has no outer state yet. Training that returns to it repeats itself, bit for bit, without the old
    momentum."""
    algorithm = DiLoCo(interval=4, outer_lr=0.7, outer_momentum=0.9, overlap=overlap)
    model = Layers()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(seat, model, optimizer, range(9))
    first = copy.deepcopy(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(seat, model, optimizer, range(9))
    assert same_parameters(model, first)


@check(least=2, copied=(False, True))
def a_loaded_state_is_not_kept(seat: Seat, copied: bool) -> None:
    """The tensors of the state would take memory besides the copies that are used. A copied optimizer makes these
    copies in its first step."""
    model = Layers()
    optimizer = hvd.DistributedOptimizer(sgd(model), algorithm=DiLoCo(interval=2, outer_momentum=0.9))
    train(seat, model, optimizer, range(2))
    state = optimizer.state_dict()
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.load_state_dict(state)
    train(seat, model, optimizer, range(1))
    held = [weakref.ref(one) for name in ("outer", "momentum") for one in state["sordino"][name]]
    del state
    gc.collect()
    assert held and all(one() is None for one in held)


@check(least=2)
def small_changes_of_parameters_in_16_bits(seat: Seat) -> None:
    """The outer parameters are in float32, so changes below a rounding error of bfloat16 add up."""
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 256.0)  # the next value in bfloat16 is 258
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0), algorithm=DiLoCo(interval=1, outer_lr=0.25, outer_momentum=0.0)
    )
    for _ in range(4):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
    assert model.weight.item() == 258.0
    outer = optimizer.state_dict()["sordino"]["outer"]
    assert all(one.dtype == torch.float32 for one in outer)


@check(least=2)
def buffers_take_no_outer_steps(seat: Seat) -> None:
    model = Layers()
    algorithm = DiLoCo(interval=2, outer_lr=0.7, outer_momentum=0.9, fragments=2, buffers="average")
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), algorithm=algorithm, named_buffers=model.named_buffers()
    )
    for turn in range(4):
        model.seen.fill_(float(seat.rank))
        train(seat, model, optimizer, range(turn, turn + 1))
        wanted = seat.rank if turn % 2 == 0 else (seat.size - 1) / 2
        torch.testing.assert_close(model.seen, torch.full((3,), float(wanted), dtype=torch.float64))


@check()
def settings_that_cannot_be(seat: Seat) -> None:
    raises(UsageError, "must divide interval=10", DiLoCo, interval=10, fragments=4)
    raises(UsageError, "must be above 0", DiLoCo, outer_lr=0.0)
    raises(UsageError, "below 1", DiLoCo, outer_momentum=1.0)
    assert [(one.momentum, one.rate) for one in map(DiLoCo, (32, 128, 512))] == [(0.0, 1.0), (0.5, 0.7), (0.9, 0.7)]
    model = Layers()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=Crossover())
    raises(UsageError, "outer_parameters() needs DiLoCo", optimizer.outer_parameters().__enter__)
    del optimizer
    if seat.size > 1:
        many = DiLoCo(interval=40, fragments=40)
        wrap = hvd.DistributedOptimizer
        raises(UsageError, "the model has only", wrap, sgd(model), model.named_parameters(), algorithm=many)
