"""NoLoCo: against its formulas in float64, against DiLoCo and plain averages of pairs, and its state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial

import torch

import sordino.torch as hvd
from checks.agreement import raises
from checks.diloco import Layers, Trained, loss_of, same_parameters, sgd, train, train_resumed
from checks.registry import Seat, check
from sordino._core import RandomGroups, Topology
from sordino.algorithms import DiLoCo, NoLoCo
from sordino.algorithms.gossip import RandomGossip
from sordino.errors import UsageError
from sordino.runtime.exchange.segments import segment_numbers

CHOICES: dict[str, NoLoCo] = {
    "pairs": NoLoCo(interval=3),
    "blocks": NoLoCo(interval=2, segments="blocks", gamma=0.3, outer_momentum=0.8, seed=5),
    "threes": NoLoCo(interval=2, peers=3, gamma=0.9, outer_lr=1.1),
    "no pull": NoLoCo(interval=2, gamma=0.0),
}


def wrap(model: torch.nn.Module, algorithm: RandomGossip | DiLoCo, **options: object) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), algorithm=algorithm, **options)


def fitting(algorithm: NoLoCo, size: int, grouped: bool = False) -> NoLoCo:
    group = 1 if not grouped else 2 if size % 2 == 0 else size
    return replace(algorithm, group_size=group, peers=max(2, min(algorithm.peers, size // group)))


class Reference:
    """All workers on one rank, by the formula of the paper: two means, of the changes and of the outer parameters."""

    def __init__(self, size: int, algorithm: NoLoCo) -> None:
        self.algorithm, self.size = algorithm, size
        self.workers: Trained = [(one := Layers(), sgd(one)) for _ in range(size)]
        names, tensors = zip(*Layers().named_parameters())
        sizes = [value.numel() * value.element_size() for value in tensors]
        self.segment = dict(zip(names, segment_numbers(names, sizes, algorithm.segments)))
        self.outer = [{name: value.detach().clone() for name, value in zip(names, tensors)} for _ in range(size)]
        self.momentum = [{name: torch.zeros_like(value) for name, value in zip(names, tensors)} for _ in range(size)]

    def step(self, turn: int) -> None:
        members = self.algorithm.group_size
        for rank, (model, optimizer) in enumerate(self.workers):
            optimizer.zero_grad()
            loss_of(model, rank, turn).backward()
        for first in range(0, self.size, members):
            together = [list(model.parameters()) for model, _ in self.workers[first : first + members]]
            for same in zip(*together):
                mean = torch.stack([one.grad for one in same]).mean(0)
                for one in same:
                    one.grad = mean.clone()
        for _, optimizer in self.workers:
            optimizer.step()
        if (turn + 1) % self.algorithm.interval == 0:
            self.outer_step((turn + 1) // self.algorithm.interval - 1)

    @torch.no_grad()
    def outer_step(self, round: int) -> None:
        algorithm = self.algorithm
        gamma = algorithm.outer_lr if algorithm.gamma is None else algorithm.gamma
        before = copy.deepcopy(self.outer)
        now = [{name: value.clone() for name, value in model.named_parameters()} for model, _ in self.workers]
        topologies = algorithm.rounds_of(self.size, max(self.segment.values()) + 1)
        for rank, (model, _) in enumerate(self.workers):
            for name, segment in self.segment.items():
                group = [rank, *(topologies[0].row(round, segment, rank)[0] if topologies else [])]
                change = sum(now[one][name] - before[one][name] for one in group) / len(group)
                mean = sum(before[one][name] for one in group) / len(group)
                momentum = self.momentum[rank][name].mul_(algorithm.outer_momentum)
                momentum += algorithm.outer_lr * change + gamma * (mean - before[rank][name])
                self.outer[rank][name] = before[rank][name] + momentum
                model.get_parameter(name).copy_(self.outer[rank][name])


def compare(model: torch.nn.Module, wanted: dict[str, torch.Tensor]) -> None:
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, wanted[name], atol=1e-12, rtol=1e-11)


@check(least=2, choice=tuple(CHOICES), grouped=(False, True))
def formulas(seat: Seat, choice: str, grouped: bool) -> None:
    algorithm = fitting(CHOICES[choice], seat.size, grouped)
    model, reference = Layers(), Reference(seat.size, algorithm)
    optimizer = wrap(model, algorithm)
    for turn in range(4 * algorithm.interval + 1):
        train(seat, model, optimizer, range(turn, turn + 1))
        reference.step(turn)
        compare(model, dict(reference.workers[seat.rank][0].named_parameters()))
        with optimizer.outer_parameters():
            compare(model, reference.outer[seat.rank])
        compare(model, dict(reference.workers[seat.rank][0].named_parameters()))


@check(least=2)
def one_group_without_pull_is_diloco(seat: Seat) -> None:
    given = {"interval": 2, "outer_lr": 0.7, "outer_momentum": 0.9}
    models = [Layers(), Layers()]
    for model, algorithm in zip(models, (DiLoCo(nesterov=False, **given), NoLoCo(gamma=0.0, peers=seat.size, **given))):
        train(seat, model, wrap(model, algorithm), range(7))
    compare(models[1], dict(models[0].named_parameters()))


@dataclass(frozen=True)
class Pairs(RandomGossip):
    """Averages of parameters in random pairs."""

    def rounds_of(self, size: int, segment_count: int) -> list[Topology]:
        return [RandomGroups(size, self.seed, 2)]


@check(least=2)
def rates_of_one_without_momentum_average_pairs(seat: Seat) -> None:
    models = [Layers(), Layers()]
    plain = NoLoCo(interval=2, outer_lr=1.0, outer_momentum=0.0, gamma=1.0, segments="blocks", seed=3)
    for model, algorithm in zip(models, (Pairs(interval=2, segments="blocks", seed=3), plain)):
        train(seat, model, wrap(model, algorithm), range(7))
    compare(models[1], dict(models[0].named_parameters()))


@check(least=2)
def outer_steps_go_where_workers_went(seat: Seat) -> None:
    """Every step moves the weight by 1, so two steps move it by 2: α 2 = 1.4, and then μ 1.4 + α 2 = 2.1 more."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, algorithm=NoLoCo(interval=2))
    seen = []
    for _ in range(4):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
        seen.append(model.weight.item())
    torch.testing.assert_close(torch.tensor(seen), torch.tensor([1.0, 1.4, 2.4, 3.5]))


@check(least=2)
def ranks_that_start_from_different_weights(seat: Seat) -> None:
    """The first rank's weights count, as if they had been broadcast."""
    model = Layers(seed=seat.rank + 1)
    optimizer = wrap(model, NoLoCo(interval=3))
    for value in model.parameters():
        value.grad = torch.zeros_like(value)
    optimizer.step()
    for mine, wanted in zip(model.parameters(), Layers(seed=1).parameters()):
        assert torch.equal(mine, wanted)


@check(least=2)
def the_pull_keeps_the_mean_of_outer_parameters(seat: Seat) -> None:
    """Without gradients and momentum only the pull acts."""
    model = Layers()
    optimizer = wrap(model, NoLoCo(interval=2, outer_momentum=0.0, gamma=0.6))
    train(seat, model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.0

    def outer() -> tuple[dict[str, torch.Tensor], float]:
        with optimizer.outer_parameters():
            return hvd.average_parameters(model), hvd.consensus_distance(model)

    mean, distance = outer()
    assert (distance > 1e-3) == (seat.size > 3), "up to 3 workers are one group"
    train(seat, model, optimizer, range(2, 14))
    later, less = outer()
    for name, value in mean.items():
        torch.testing.assert_close(later[name], value, atol=1e-12, rtol=1e-11)
    assert less <= distance / 2 + 1e-12


@check(least=2)
def a_checkpoint_has_the_outer_state(seat: Seat) -> None:
    """Training that resumes in the middle of an interval is the same, bit for bit; without the momentum it is not."""
    algorithm = NoLoCo(interval=4, gamma=0.5)
    model = Layers()
    optimizer = wrap(model, algorithm)
    assert optimizer.state_dict()["sordino"].keys() == {"algorithm", "steps", "round"}
    train(seat, model, optimizer, range(6))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    own = saved[1]["sordino"]
    assert own.keys() == {"algorithm", "steps", "round", "outer", "momentum"}
    assert own["outer"].keys() == own["momentum"].keys() == dict(model.named_parameters()).keys()
    train(seat, model, optimizer, range(6, 14))
    cases = [(saved, True)]
    for part in ("outer", "momentum"):
        wrong = copy.deepcopy(saved)
        for values in wrong[1]["sordino"][part].values():
            values.zero_()
        cases.append((wrong, False))
    for state, same in cases:
        other, _ = train_resumed(seat, partial(wrap, algorithm=algorithm), state, range(6, 14))
        assert same_parameters(model, other) == same


@check(least=2)
def unfreezing_a_parameter_keeps_the_outer_state_of_the_others(seat: Seat) -> None:
    model = Layers()
    model.head.requires_grad_(False)
    optimizer = wrap(model, NoLoCo(interval=4))
    train(seat, model, optimizer, range(5))
    before = copy.deepcopy(optimizer.state_dict()["sordino"])
    own = [value.detach().clone() for value in model.parameters()]
    model.head.requires_grad_(True)
    optimizer.param_groups[0]["lr"] = 0.0
    train(seat, model, optimizer, range(5, 6))
    after = optimizer.state_dict()["sordino"]
    assert after["outer"].keys() - before["outer"].keys() == {"head.weight", "head.bias"}
    for part in ("outer", "momentum"):
        assert all(torch.equal(after[part][name], value) for name, value in before[part].items())
    assert all(torch.equal(value, kept) for value, kept in zip(model.parameters(), own))


@check(least=2)
def small_changes_of_parameters_in_16_bits(seat: Seat) -> None:
    """The outer parameters are in float32, so changes below a rounding error of bfloat16 add up."""
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 256.0)  # the next value in bfloat16 is 258
    algorithm = NoLoCo(interval=1, outer_lr=0.25, outer_momentum=0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=2.0), algorithm=algorithm)
    for _ in range(4):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
    assert model.weight.item() == 258.0
    assert all(one.dtype == torch.float32 for one in optimizer.state_dict()["sordino"]["outer"].values())


@check(least=2)
def buffers_take_no_outer_steps(seat: Seat) -> None:
    model, algorithm = Layers(), NoLoCo(interval=2, buffers="average")
    optimizer = wrap(model, algorithm, named_buffers=model.named_buffers())
    topology = algorithm.rounds_of(seat.size, 1)[0]
    for turn in range(4):
        model.seen.fill_(float(seat.rank))
        train(seat, model, optimizer, range(turn, turn + 1))
        group = [seat.rank, *(topology.row(turn // 2, 0, seat.rank)[0] if turn % 2 else [])]
        torch.testing.assert_close(model.seen, torch.full((3,), sum(group) / len(group), dtype=torch.float64))


@check(least=2)
def one_copy_of_the_parameters_is_sent(seat: Seat) -> None:
    """One copy is sent to each other worker of the group, for any pull."""
    model, algorithm = Layers(), NoLoCo(interval=1, gamma=0.2)
    optimizer = wrap(model, algorithm)
    size = sum(value.numel() * value.element_size() for value in model.parameters())
    train(seat, model, optimizer, range(2))
    for turn in range(2, 6):
        before = hvd.stats()["bytes_sent"]
        train(seat, model, optimizer, range(turn, turn + 1))
        sent = hvd.stats()["bytes_sent"] - before
        others = len(algorithm.rounds_of(seat.size, 1)[0].destinations(turn, 0, seat.rank))
        assert sent == size if others == 1 else size <= sent <= size * others


@check()
def settings_that_cannot_be(seat: Seat) -> None:
    raises(UsageError, "must be above 0", NoLoCo, outer_lr=0.0)
    raises(UsageError, "below 1", NoLoCo, outer_momentum=1.0)
    raises(UsageError, "must be at least 0, or None", NoLoCo, gamma=-0.1)
    raises(UsageError, "must be at least 2", NoLoCo, peers=1)
    raises(UsageError, "must be at least 1", NoLoCo, group_size=0)
    if seat.size > 1:
        raises(UsageError, f"peers={seat.size + 1}", wrap, Layers(), NoLoCo(peers=seat.size + 1))
        raises(UsageError, "into equal groups", wrap, Layers(), NoLoCo(group_size=seat.size + 1))
