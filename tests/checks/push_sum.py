"""PushSum and ElasticAveraging against their recurrences in float64."""

from __future__ import annotations

import random
import time

import pytest
import torch

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino.algorithms import ElasticAveraging, PushSum
from sordino.errors import UsageError

PUSHES = {
    "plain": PushSum(),
    "segments": PushSum(segments="blocks", interval=2),
    "changing": PushSum(peers={0: 1, 3: 2, 6: 1}),
    "overlap": PushSum(overlap=1, segments="blocks"),
    "overlap-changing": PushSum(overlap=3, peers={0: 1, 3: 2, 6: 1}),
}
STEPS = 12


class Small(torch.nn.Module):
    """Model with two blocks and two dtypes; all elements of a parameter are equal. One parameter does not fit into a
    cache."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.wide = torch.nn.ParameterList([torch.full((70_001,), 1.0 + rank), torch.full((2, 3), 2.0 - rank).double()])
        self.last = torch.nn.ParameterList([torch.full((7,), -1.5 * rank)])

    @torch.no_grad()
    def pull(self, rank: int, turn: int) -> None:
        for index, parameter in enumerate(self.parameters()):
            parameter.grad = torch.full_like(parameter, gradient(rank, turn, index))


def gradient(rank: int, turn: int, index: int) -> float:
    return ((rank * 7 + turn * 3 + index * 5) % 11 - 5) / 8


def starts(size: int) -> list[list[float]]:
    return [[parameter.flatten()[0].item() for parameter in Small(rank).parameters()] for rank in range(size)]


def wrap(model: Small, algorithm: PushSum | ElasticAveraging, lr: float = 0.1) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), algorithm=algorithm
    )


class Pushed:
    """The numerators and weights of all ranks, and the messages in flight, in float64."""

    def __init__(self, algorithm: PushSum, size: int) -> None:
        self.algorithm, self.size = algorithm, size
        self.topology = algorithm.rounds_of(size, 1)[0]
        self.x = [torch.tensor(start, dtype=torch.float64) for start in starts(size)]
        self.weight = [1.0] * size
        self.under_way: list[list[tuple[torch.Tensor, float]]] = []
        self.round = 0

    def step(self, turn: int, lr: float) -> None:
        for rank in range(self.size):
            self.x[rank] -= lr * torch.tensor([gradient(rank, turn, index) for index in range(3)])
        if (turn + 1) % self.algorithm.interval == 0:
            self.exchange()

    def exchange(self) -> None:
        overlap = self.algorithm.overlap
        if len(self.under_way) == overlap > 0:
            self.absorb()
        rows = [self.topology.row(self.round, 0, rank) for rank in range(self.size)]
        self.under_way.append(
            [
                (scale * sum(self.x[j] for j in sources), scale * sum(self.weight[j] for j in sources))
                for sources, _, scale in rows
            ]
        )
        for rank, (_, _, scale) in enumerate(rows):
            self.x[rank] = self.x[rank] * scale
            self.weight[rank] *= scale
        self.round += 1
        if overlap == 0:
            self.absorb()

    def absorb(self) -> None:
        for rank, (x, weight) in enumerate(self.under_way.pop(0)):
            self.x[rank] = self.x[rank] + x
            self.weight[rank] += weight

    def values(self, rank: int) -> list[float]:
        return (self.x[rank] / self.weight[rank]).tolist()


def weights(optimizer: hvd.DistributedOptimizer) -> list[float]:
    return [weight.item() for weight in optimizer._strategy._mixing.arena.weights]


def is_near(model: torch.nn.Module, wanted: list[float]) -> None:
    for parameter, value in zip(model.parameters(), wanted):
        torch.testing.assert_close(parameter.double(), torch.full_like(parameter, value).double(), atol=2e-6, rtol=2e-6)


@check(least=2, choice=tuple(PUSHES))
def a_push_is_the_recurrence(seat: Seat, choice: str) -> None:
    """Messages may be late: the number of an exchange alone decides which messages it absorbs."""
    algorithm = PUSHES[choice]
    if seat.size == 2 and isinstance(algorithm.peers, dict):
        algorithm = PushSum(overlap=algorithm.overlap)
    model, pause = Small(seat.rank), random.Random(seat.rank)
    optimizer, pushed = wrap(model, algorithm), Pushed(algorithm, seat.size)
    for turn in range(STEPS):
        time.sleep(pause.random() * 0.003)
        model.pull(seat.rank, turn)
        optimizer.step()
        pushed.step(turn, 0.1)
        is_near(model, pushed.values(seat.rank))
        for weight in weights(optimizer):
            assert weight == pytest.approx(pushed.weight[seat.rank], rel=1e-12)
    optimizer.flush()
    # Nothing is in flight now: weights sum to N, and the sum of x = weight * z is the initial sum plus all additions.
    total = hvd.allreduce(torch.tensor(weights(optimizer)[:1], dtype=torch.float64), op=hvd.Sum)
    assert total.item() == pytest.approx(seat.size, rel=1e-12)
    for index, parameter in enumerate(model.parameters()):
        numerator = parameter.detach().double() * weights(optimizer)[0]
        added = sum(gradient(rank, turn, index) for rank in range(seat.size) for turn in range(STEPS))
        wanted = sum(start[index] for start in starts(seat.size)) - 0.1 * added
        total = hvd.allreduce(numerator, op=hvd.Sum)
        torch.testing.assert_close(total, torch.full_like(total, wanted), atol=1e-5 * seat.size, rtol=1e-5)


@check(least=2)
def a_worker_is_at_most_overlap_exchanges_ahead(seat: Seat) -> None:
    overlap = 2
    optimizer = wrap(Small(seat.rank), PushSum(overlap=overlap))
    began = 0.0
    if seat.rank == seat.last:
        seat.meet("ahead", [0])
        time.sleep(0.1)
        began = time.monotonic()
    for turn in range(overlap + seat.size):
        if turn == overlap and seat.rank == 0:
            seat.meet("ahead", [0])  # the last rank has not taken a step
        optimizer.step()
    began = hvd.broadcast(torch.tensor([began], dtype=torch.float64), root_rank=seat.last).item()
    assert time.monotonic() >= began > 0


@check(least=2, choice=("overlap", "elastic"))
def parameters_can_be_added_in_mid_run(seat: Seat, choice: str) -> None:
    model, late = Small(seat.rank), torch.nn.Parameter(torch.full((5,), 4.0 * seat.rank))
    optimizer = wrap(model, PushSum(overlap=2) if choice == "overlap" else ElasticAveraging(), lr=0.0)
    before = [hvd.allreduce(p.detach().double()) for p in model.parameters()]
    for _ in range(3):
        optimizer.step()
    optimizer.add_param_group({"params": [late]})
    for _ in range(3):
        optimizer.step()
    optimizer.flush()
    wanted = [*before, torch.full((5,), 4.0 * sum(range(seat.size)) / seat.size)]
    for parameter, mean in zip([*model.parameters(), late], wanted):
        torch.testing.assert_close(hvd.allreduce(parameter.detach().double()), mean.double(), atol=1e-5, rtol=1e-5)


@check(least=2)
def elastic_averaging_is_the_recurrence(seat: Seat) -> None:
    algorithm = ElasticAveraging(interval=2, moving_rate=0.8)
    model = Small(seat.rank)
    optimizer = wrap(model, algorithm)
    alpha = 0.8 / seat.size
    values = [torch.tensor(start, dtype=torch.float64) for start in starts(seat.size)]
    centre = sum(values) / seat.size
    for turn in range(STEPS):
        model.pull(seat.rank, turn)
        optimizer.step()
        for rank in range(seat.size):
            values[rank] -= 0.1 * torch.tensor([gradient(rank, turn, index) for index in range(3)])
        if turn % 2 == 1:
            apart = [value - centre for value in values]
            values = [value - alpha * away for value, away in zip(values, apart)]
            centre = centre + alpha * sum(apart)
        is_near(model, values[seat.rank].tolist())
    state = optimizer.state_dict()["sordino"]
    for run in state["centre"]:
        seat.same("centre", run)
    twin = Small(seat.rank)
    twin.load_state_dict(model.state_dict())
    resumed = wrap(twin, algorithm)
    resumed.load_state_dict(optimizer.state_dict())
    for turn in range(4):
        for one, its in ((model, optimizer), (twin, resumed)):
            one.pull(seat.rank, turn)
            its.step()
    for mine, other in zip(model.parameters(), twin.parameters()):
        assert torch.equal(mine, other)


@check(least=2)
def a_loaded_push_begins_with_nothing_under_way(seat: Seat) -> None:
    model = Small(seat.rank)
    optimizer = wrap(model, PushSum(overlap=2))
    for turn in range(3):
        model.pull(seat.rank, turn)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weights(optimizer) == [1.0]
    mean = hvd.average_parameters(model)
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = None
        optimizer.step()
    optimizer.flush()
    after = hvd.average_parameters(model)
    for name, value in mean.items():
        torch.testing.assert_close(after[name], value, atol=1e-5, rtol=1e-5)


@check(least=2)
def impossible_pushes_are_refused(seat: Seat) -> None:
    for wrong in ({"peers": 0}, {"peers": {1: 1}}, {"peers": {0: 1.5}}, {"peers": {0: 1, -3: 1}}, {"overlap": -1}):
        with pytest.raises(UsageError, match=rf"PushSum\({next(iter(wrong))}=.*must be at least"):
            PushSum(**wrong)
    with pytest.raises(UsageError, match="moving_rate"):
        ElasticAveraging(moving_rate=0.0)
    if seat.size > 2:
        with pytest.raises(UsageError, match=r"peers=9: .* workers have from 1 to"):
            wrap(Small(seat.rank), PushSum(peers=9))


@check(least=2)
def a_rolled_back_push_has_the_loaded_parameters(seat: Seat) -> None:
    model = Small(seat.rank)
    optimizer = wrap(model, PushSum(overlap=2))
    kept, state = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    for turn in range(4):
        model.pull(seat.rank, turn)
        optimizer.step()
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name])


@check(least=2)
def a_rolled_back_centre_is_that_of_the_state(seat: Seat) -> None:
    model = Small(seat.rank)
    optimizer = wrap(model, ElasticAveraging())
    optimizer.step()
    state = optimizer.state_dict()
    centre = [run.clone() for run in state["sordino"]["centre"]]
    for turn in range(3):
        model.pull(seat.rank, turn)
        optimizer.step()
    optimizer.load_state_dict(state)
    for now, then in zip(optimizer.state_dict()["sordino"]["centre"], centre):
        assert torch.equal(now, then)


@check(least=2)
def a_step_left_out_by_one_rank_begins_like_all(seat: Seat) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), algorithm=ElasticAveraging(interval=4)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for turn in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if turn == 0 and seat.rank == 0:
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        hvd.allreduce(torch.ones(1), name="after")
