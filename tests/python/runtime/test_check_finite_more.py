"""check_finite: the definition of finite, overflows in reductions, sparse gradients, several backward passes, join, and
process sets."""

from __future__ import annotations

import math

import pytest
import torch
from finite_cases import leaf, refused, wrap

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import (  # fmt: skip
    Algorithm,
    LocalSGD,
)
from sordino.errors import NonFinite, PeerLost
from sordino.runtime.gradients.nonfinite import Evidence, largest_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BAD = {"NaN": [math.nan], "Inf": [math.inf, -math.inf]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", (1, 2, 3, 7, 16, 17, 33, 100, 1001))
def test_each_place_is_looked_at(dtype: torch.dtype, size: int) -> None:
    for place in {0, 1 % size, size // 2, size - 1}:
        for kind, values in BAD.items():
            for value in values:
                tensor = torch.linspace(-3, 3, size).to(dtype)
                tensor[place] = value
                found = Evidence([4, 9], [torch.ones(size, dtype=dtype), tensor]).found
                assert found == {9: ("", "Inf", "NaN").index(kind)}
                assert not largest_of([tensor]).isfinite().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_values_whose_sum_is_not(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for values in ([most] * 9, [-most] * 9, [most, -most], [0.0], []):
        tensor = torch.tensor(values, dtype=dtype)
        assert Evidence([0], [tensor]).found == {}
        assert tensor.numel() == 0 or largest_of([tensor]).item() == tensor.abs().max().item()


def test_nan_beside_infinity_and_slices() -> None:
    grid = torch.ones(5, 7)
    grid[2, 3] = math.inf
    assert Evidence([0, 1, 2], [grid.t(), grid[:, 3], grid[:, ::2]]).found == {0: 1, 1: 1}
    assert Evidence([0], [torch.tensor([math.inf, math.nan, -math.inf])]).found == {0: 2}
    assert Evidence([0], [torch.tensor([math.inf, -math.inf])]).found == {0: 1}


def narrowed(place: int) -> None:
    parameters = {"v": leaf(), "w": leaf()}
    optimizer = wrap(parameters, compression=hvd.Compression.fp16)
    scale = torch.ones(5)
    scale[place] = 70000.0 if hvd.rank() == 1 else 1.0
    (parameters["w"] * scale).sum().backward()
    error = refused(optimizer.step)
    assert error.tensors == {1: {"w": "Inf"}}
    assert all((one == 1).all() for one in parameters.values())


@pytest.mark.parametrize("place", (0, 2, -1))
def test_what_compression_makes_infinite_is_named(place: int) -> None:
    sim.run(3, narrowed, place)


def overflowing() -> None:
    parameters = {"v": leaf(3, torch.float16), "w": leaf(7, torch.float16)}
    optimizer = wrap(parameters, op=hvd.Sum)
    for turn in range(2):
        (parameters["v"].sum() + 40000.0 * parameters["w"][3]).backward()
        error = refused(optimizer.step)
        assert error.ranks == () and error.tensors == {} and "overflowed in 'w'" in str(error), turn
        optimizer.zero_grad()
    parameters["w"][3].backward()
    optimizer.step()
    assert parameters["w"].tolist() == [1, 1, 1, 1 - 0.5 * hvd.size(), 1, 1, 1]


def test_a_reduction_that_overflows_is_refused_by_all() -> None:
    sim.run(3, overflowing, ranks_per_node=2)


def sparse(value: float) -> None:
    table = torch.nn.Embedding(9, 3, sparse=True)
    torch.nn.init.ones_(table.weight)
    dense = leaf()
    optimizer = wrap({"table": table.weight, "dense": dense})
    for turn in range(3):
        optimizer.zero_grad()
        factor = value if turn == 1 and hvd.rank() == 0 else 1.0
        (table(torch.tensor([hvd.rank(), 4])).sum() * factor + dense.sum()).backward()
        before = table.weight.detach().clone()
        if turn == 1:
            assert refused(optimizer.step).tensors == {0: {"table": "NaN" if math.isnan(value) else "Inf"}}
            assert torch.equal(before, table.weight) and dense[0].item() == 0.5
        else:
            optimizer.step()
    assert dense[0].item() == 0.0 and table.weight[4, 0].item() == 0.0


@pytest.mark.parametrize("value", (math.nan, -math.inf))
def test_sparse_gradients(value: float) -> None:
    sim.run(2, sparse, value)


def several_passes(bad_pass: int) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, backward_passes_per_step=3)
    for turn in range(3):
        optimizer.zero_grad()
        for number in range(3):
            bad = turn == 1 and number == bad_pass and hvd.rank() == 1
            (weight.sum() * (math.nan if bad else 1.0)).backward()
        if turn == 1:
            assert refused(optimizer.synchronize).ranks == (1,)
        else:
            optimizer.step()
    assert weight.tolist() == [1 - 0.5 * 6] * 5


@pytest.mark.parametrize("bad_pass", (0, 2))
def test_several_backward_passes(bad_pass: int) -> None:
    sim.run(2, several_passes, bad_pass)


def joining(op: int) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, op=op)
    for turn in range(3 if hvd.rank() == 1 else 1):
        optimizer.zero_grad()
        (weight.sum() * (math.inf if turn == 1 else 1.0)).backward()
        if turn == 1:
            assert refused(optimizer.step).tensors == {1: {"w": "Inf"}}
        else:
            optimizer.step()
    assert hvd.join() == 1


@pytest.mark.parametrize("op", (hvd.Average, hvd.Sum, hvd.Max))
def test_ranks_that_have_joined_have_nothing_to_say(op: int) -> None:
    sim.run(3, joining, op)


def some_ranks() -> None:
    some = hvd.add_process_set([0, 2])
    for number, process_set in enumerate((some, hvd.global_process_set)):
        weight = leaf()
        optimizer = wrap({"w": weight}, process_set=process_set)
        (weight.sum() * (math.nan if hvd.rank() == 2 else 1.0)).backward()
        if number == 0 and hvd.rank() == 1:
            optimizer.step()  # this rank is not in the set
            assert weight[0].item() == 0.5
        else:
            assert refused(optimizer.step).tensors == {2: {"w": "NaN"}}


def test_process_sets() -> None:
    sim.run(3, some_ranks)


def dropped(algorithm: Algorithm) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm)
    (weight.sum() * (math.nan if hvd.rank() == 0 else 1.0)).backward()
    optimizer.synchronize()  # within the group; the step would be refused
    optimizer.zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight[0].item() == 0.5
    optimizer.zero_grad()
    (weight.sum() * (math.nan if hvd.rank() == 3 else 1.0)).backward()
    refused(optimizer.step)
    optimizer.zero_grad()
    if hvd.rank() != 3:
        weight.sum().backward()  # and one rank has no batch
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("algorithm", (LocalSGD(9, 4), LocalSGD(9, 2), LocalSGD(9, 2, "allreduce")), ids=str)
def test_gradients_that_are_dropped_leave_no_trace(algorithm: Algorithm) -> None:
    sim.run(4, dropped, algorithm)


def test_the_last_one_left_is_judged_when_the_loss_is_seen_in_its_step() -> None:
    """Gradients that no backward pass computed are checked in step(), where the loss of the other rank is noticed."""

    def train() -> tuple[list[int], list[float]]:
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), [("weight", weight)], check_finite=True)
        refusals = []
        for step in range(3):
            if step == 1 and hvd.rank() == 1:
                raise PeerLost("this rank ends here")
            weight.grad = torch.full_like(weight, math.nan if step == 1 else 1.0)
            try:
                optimizer.step()
            except NonFinite:
                refusals.append(step)
        return refusals, weight.tolist()

    assert sim.run(2, train, on_peer_lost="continue")[0] == ([1], [0.0, 0.0])
