"""check_finite with every algorithm: all ranks refuse a bad batch, and continue as if it had never been there."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from algorithm_table import SYNCHRONOUS, often

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    AllReduce,
    CaPS,
    Crossover,
    Layered,
    LocalSGD,
    PushSum,
    ScheduledPull,
)
from sordino.errors import NonFinite

SHAPES = {"a": (7,), "b": (3, 5), "c": (1001,), "d": (1,), "e": (2, 1, 3)}
BAD_STEP, STEPS = 2, 6
ALGORITHMS: dict[str, Algorithm] = {
    **{name: often(one) for name, one in SYNCHRONOUS.items()},
    "allreduce in small segments": AllReduce(bucket_bytes=64),
    "caps": CaPS(threshold=101),
    "caps by servers": CaPS(exchange="parameter-server"),
    "crossover every 2": Crossover(interval=2),
    "crossover in groups": Crossover(group_size=2),
    "crossover by leaders": Crossover(group_size=2, within="leader"),
    "layered": Layered(1),
    "layered pairs": Layered(2),
    "local in groups": LocalSGD(2, 2),
    "local of gradients": LocalSGD(2, 2, aggregate="gradients"),
    "local whole": LocalSGD(2, exchange="allreduce"),
    "local whole in groups": LocalSGD(3, 2, exchange="allreduce"),
    "local later": LocalSGD(2, 2, start=3),
    "push-sum overlapped": PushSum(overlap=2),
}
CULPRITS = {"the first": [0], "the last": [-1], "two": [1, -1]}
# Bad values, their positions, and their tensors.
WAYS = {
    "nan first": (math.nan, 0, ["c"]),
    "inf last": (math.inf, -1, ["a", "b"]),
    "-inf middle": (-math.inf, None, ["e"]),
    "nan alone": (math.nan, 0, ["d"]),
}


class Training:
    """Training of one rank: gradients depend on the parameters, the step and the rank."""

    def __init__(self, algorithm: Algorithm, dtype: torch.dtype, **options: Any) -> None:
        self.parameters = {
            name: torch.nn.Parameter(torch.linspace(-1, 1, math.prod(shape)).reshape(shape).to(dtype))
            for name, shape in SHAPES.items()
        }
        self.algorithm = algorithm
        options = {"check_finite": True, **options}
        if dtype == torch.float16:  # in which Adam itself divides by zero
            inner: torch.optim.Optimizer = torch.optim.SGD(self.parameters.values(), lr=0.01, momentum=0.9)
        else:
            inner = torch.optim.Adam(self.parameters.values(), lr=0.01)
        self.optimizer = hvd.DistributedOptimizer(inner, self.parameters.items(), algorithm=algorithm, **options)

    def backward(self, step: int, value: float = 0.0, place: int | None = 0, names: list[str] | None = None) -> None:
        """Compute the gradients of a step, with `value` at one place of the tensors `names`; None is the middle."""
        loss = torch.zeros((), dtype=torch.float64)
        for number, (name, parameter) in enumerate(self.parameters.items()):
            slope = math.sin(1 + step + 10 * hvd.rank() + 100 * number)
            scale = torch.ones(parameter.numel(), dtype=parameter.dtype)
            if name in (names or []):
                scale[scale.numel() // 2 if place is None else place] = value
            if not (isinstance(self.algorithm, AllReduce) and self.algorithm.double_buffering):
                loss = loss + (0.1 * parameter * parameter).sum()
            loss = loss + (slope * parameter * scale.view_as(parameter)).sum()
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        if isinstance(self.algorithm, Layered):
            self.optimizer.synchronize()  # otherwise the next use of a parameter would raise

    def snapshot(self) -> list[Any]:
        """Return the parameters and all state. Collective."""
        values = [parameter.detach().clone() for parameter in self.parameters.values()]
        return [values, copy.deepcopy(self.optimizer.state_dict())]


def same(one: Any, other: Any) -> bool:
    """Return whether both are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def expected(culprits: list[int], names: list[str], value: float) -> dict[int, dict[str, str]]:
    kind = "NaN" if math.isnan(value) else "Inf"
    return {rank: dict.fromkeys(names, kind) for rank in sorted(culprits)}


def train(algorithm: Algorithm, culprits: list[int], way: str, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """Train with a bad batch between good ones; without culprits, leave the bad batch out."""
    training = Training(algorithm, dtype, **options)
    culprits = sorted({rank % hvd.size() for rank in culprits})
    for step in range(STEPS):
        if step == BAD_STEP and not culprits:
            continue
        bad = step == BAD_STEP and hvd.rank() in culprits
        training.optimizer.zero_grad()
        training.backward(step, *(WAYS[way] if bad else ()))
        if step != BAD_STEP:
            training.step()
            continue
        before = training.snapshot() if not isinstance(algorithm, Layered) else None
        with pytest.raises(NonFinite) as caught:
            training.step()
        value, _, names = WAYS[way]
        assert caught.value.tensors == expected(culprits, names, value), caught.value
        assert caught.value.ranks == tuple(culprits) and isinstance(caught.value, ArithmeticError)
        for name in names:
            assert f"rank {culprits[0]} has" in str(caught.value) and f"in '{name}'" in str(caught.value)
        assert before is None or same(before, training.snapshot()), "something has changed"
    training.optimizer.flush()
    return training.snapshot()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("who", CULPRITS)
@pytest.mark.parametrize("way", WAYS)
def test_a_bad_batch_is_as_if_it_had_never_been(algorithm: str, who: str, way: str) -> None:
    chosen = ALGORITHMS[algorithm]
    arguments = [way, torch.float32, {}]
    bad = sim.run(4, train, chosen, CULPRITS[who], *arguments)
    good = sim.run(4, train, chosen, [], way, torch.float32, {"check_finite": False})
    for rank, (one, other) in enumerate(zip(bad, good)):
        assert same(one, other), f"rank {rank} trained on otherwise"


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("algorithm", ("allreduce", "crossover", "local-sgd", "layered", "caps"))
@pytest.mark.parametrize("ranks_per_node", (0, 1))
def test_other_dtypes_and_nodes(algorithm: str, dtype: torch.dtype, ranks_per_node: int) -> None:
    chosen = ALGORITHMS[algorithm]
    bad, good = (
        sim.run(3, train, chosen, culprits, "inf last", dtype, {}, ranks_per_node=ranks_per_node)
        for culprits in ([1], [])
    )
    assert same(bad, good)


OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"op": hvd.Sum},
    "min": {"op": hvd.Min},
    "max": {"op": hvd.Max},
    "product": {"op": hvd.Product},
    "adasum": {"op": hvd.Adasum},
    "fp16": {"compression": hvd.Compression.fp16},
    "bf16": {"compression": hvd.Compression.bf16},
    "predivided": {"gradient_predivide_factor": 3.0},
    "groups": {"groups": 2},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_other_reductions(option: str, way: str) -> None:
    """Min and Max can make an infinity disappear; it is still found."""
    bad, good = (
        sim.run(2, train, AllReduce(), culprits, way, torch.float32, OPTIONS[option]) for culprits in ([-1], [])
    )
    assert same(bad, good)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "adpsgd", "pull", "buffered"])
def test_one_rank_alone(algorithm: str) -> None:
    others = {"adpsgd": ADPSGD(), "pull": ScheduledPull(), "buffered": AllReduce(double_buffering=True)}
    chosen = (ALGORITHMS | others)[algorithm]
    if getattr(chosen, "group_size", 1) not in (None, 1):
        chosen = type(chosen)()  # a single rank is no group
    bad, good = (sim.run(1, train, chosen, culprits, "nan first", torch.float32, {}) for culprits in ([0], []))
    assert same(bad, good)


def buffered(culprits: list[int]) -> Any:
    """A bad gradient is found at its use, one step later; the gradient in flight at that time is not lost."""
    training = Training(AllReduce(double_buffering=True), torch.float32)
    raised = []
    for step in range(STEPS):
        if step == BAD_STEP and not culprits:
            continue
        bad = step == BAD_STEP and hvd.rank() in culprits
        training.optimizer.zero_grad()
        training.backward(step, *(WAYS["nan first"] if bad else ()))
        if step == 3:
            training.optimizer.state_dict()  # waits for operations in flight
        values = training.snapshot()[0]
        try:
            training.step()
        except NonFinite as error:
            raised.append((step, error.tensors))
            assert same(values, training.snapshot()[0])
    training.optimizer.flush()
    assert raised == ([(BAD_STEP + 1, expected(culprits, ["c"], math.nan))] if culprits else [])
    return training.snapshot()


@pytest.mark.parametrize("culprits", ([0], [2], [0, 1]))
def test_double_buffering(culprits: list[int]) -> None:
    assert same(sim.run(3, buffered, culprits), sim.run(3, buffered, []))


def train_alone(algorithm: Algorithm, culprit: int) -> tuple[list[int], list[torch.Tensor]]:
    training = Training(algorithm, torch.float32)
    raised = []
    for step in range(3 * STEPS):
        training.optimizer.zero_grad()
        bad = step % STEPS == BAD_STEP and hvd.rank() == culprit
        training.backward(step, *(WAYS["inf last"] if bad else ()))
        state = copy.deepcopy(training.optimizer._inner.state_dict())
        try:
            training.step()
        except NonFinite as error:
            raised.append(step)
            assert error.tensors == expected([culprit], ["a", "b"], math.inf)
            assert same(state, training.optimizer._inner.state_dict())
    training.optimizer.flush()
    return raised, [parameter.detach().clone() for parameter in training.parameters.values()]


@pytest.mark.parametrize(
    "algorithm", (ADPSGD(), ADPSGD(overlap=0), ScheduledPull(2), ScheduledPull(1, overlap="none")), ids=str
)
def test_who_waits_for_nobody_refuses_alone(algorithm: Algorithm) -> None:
    for rank, (raised, values) in enumerate(sim.run(3, train_alone, algorithm, 1)):
        assert raised == ([BAD_STEP, BAD_STEP + STEPS, BAD_STEP + 2 * STEPS] if rank == 1 else [])
        assert all(value.isfinite().all() for value in values)
