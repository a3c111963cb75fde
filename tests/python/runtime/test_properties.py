"""Properties of collectives for shapes, dtypes, reductions and worlds that Hypothesis draws."""

from __future__ import annotations

import random

import pytest
import torch
from checks.reference import DTYPES, FOLDS, assert_equal, assert_reduced, values
from hypothesis import given, settings
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino import sim

worlds = st.tuples(st.integers(1, 5), st.integers(0, 3))
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.integers(0, 40_000).map(lambda n: (n,))
dtypes = st.sampled_from(DTYPES)
folds = st.sampled_from(sorted(FOLDS.values()))
factors = st.sampled_from([1.0, 0.5, 2.0, -1.5])
seeds = st.integers(0, 10_000)


@pytest.fixture(autouse=True, scope="module")
def deadline() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORDINO_TIMEOUT_S", "60")
        yield


def run(world: tuple[int, int], function) -> list:
    return sim.run(world[0], function, ranks_per_node=world[1])


@given(
    worlds, st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=5), folds, factors, factors, st.booleans(), seeds
)
def test_grouped_allreduce(world, drawn, op, pre, post, in_place, seed) -> None:
    inputs = [
        [values(rank, shape, dtype, seed + i) for rank in range(world[0])] for i, (shape, dtype) in enumerate(drawn)
    ]

    def body() -> list[torch.Tensor]:
        mine = [row[hvd.rank()].clone() for row in inputs]
        call = hvd.grouped_allreduce_ if in_place else hvd.grouped_allreduce
        return list(call(mine, op=op, prescale_factor=pre, postscale_factor=post))

    results = run(world, body)
    for rank in range(world[0]):
        for result, first, row in zip(results[rank], results[0], inputs):
            assert_reduced(result, op, row, pre, post)
            assert_equal(result, first)


@given(worlds, st.integers(1, 20), st.permutations(range(12)), seeds)
def test_any_order_of_submission_gives_the_same_bits(world, length, order, seed) -> None:
    def body() -> list[torch.Tensor]:
        mine = list(order)
        random.Random(hvd.rank() + seed).shuffle(mine)
        handles = {
            i: hvd.allreduce_async(values(hvd.rank(), length * (i + 1), torch.float32, i), name=f"{i}") for i in mine
        }
        return [hvd.synchronize(handles[i]) for i in sorted(handles)]

    results = run(world, body)
    for i in range(12):
        inputs = [values(rank, length * (i + 1), torch.float32, i) for rank in range(world[0])]
        assert_reduced(results[0][i], hvd.Average, inputs)
        for other in results[1:]:
            assert_equal(other[i], results[0][i])


@given(worlds, st.data(), dtypes.filter(lambda d: d not in (torch.uint16, torch.uint32, torch.uint64)), seeds)
def test_alltoall_conserves_rows(world, data, dtype, seed) -> None:
    size = world[0]
    table = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=size, max_size=size), min_size=size, max_size=size))

    def body():
        mine = values(hvd.rank(), (sum(table[hvd.rank()]), 2), dtype, seed)
        output, received = hvd.alltoall(mine, splits=table[hvd.rank()])
        back, sent = hvd.alltoall(output, splits=received)
        assert_equal(back, mine)
        return received.tolist(), sent.tolist(), hvd.allgather(mine)

    for rank, (received, sent, gathered) in enumerate(run(world, body)):
        assert received == [row[rank] for row in table] and sent == table[rank]
        assert_equal(gathered, torch.cat([values(r, (sum(table[r]), 2), dtype, seed) for r in range(size)]))


@given(worlds, st.integers(0, 60), st.sampled_from([hvd.Sum, hvd.Average, hvd.Max]), dtypes, seeds)
def test_reducescatter_then_allgather_is_allreduce(world, rows, op, dtype, seed) -> None:
    inputs = [values(rank, (rows, 3), dtype, seed) for rank in range(world[0])]

    def body() -> torch.Tensor:
        return hvd.allgather(hvd.reducescatter(inputs[hvd.rank()], op=op))

    for result in run(world, body):
        assert_reduced(result, op, inputs)


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=5, max_size=5), st.sampled_from(sorted(FOLDS.values())))
@settings(max_examples=15)
def test_join_stands_for_zeros(size, steps, op) -> None:
    inputs = [[values(rank, 30, torch.float64, step) for rank in range(size)] for step in range(4)]

    def body() -> int:
        for step in range(steps[hvd.rank()]):
            present = [t if steps[rank] > step else torch.zeros_like(t) for rank, t in enumerate(inputs[step])]
            assert_reduced(hvd.allreduce(inputs[step][hvd.rank()], op=op, name="x"), op, present)
        return hvd.join()

    last = run((size, 0), body)
    assert len(set(last)) == 1 and 0 <= last[0] < size


@given(worlds, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.sampled_from([1, 64, 1 << 20]), seeds)
@settings(max_examples=15)
def test_distributed_optimizer_is_training_on_the_whole_batch(world, passes, groups, to_none, segment, seed) -> None:
    from sordino.algorithms import AllReduce

    size, steps = world[0], 3
    data = [
        values(0, (steps, passes, size, 4, 5), torch.float64, seed),
        values(1, (steps, passes, size, 4, 2), torch.float64, seed),
    ]

    def train(wrap: bool, part: slice) -> torch.Tensor:
        layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
        for i, parameter in enumerate(layers.parameters()):
            parameter.data.copy_(values(2, tuple(parameter.shape), torch.float64, i))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.05, momentum=0.9)
        if wrap:
            optimizer = hvd.DistributedOptimizer(
                optimizer, backward_passes_per_step=passes, groups=groups, algorithm=AllReduce(bucket_bytes=segment)
            )
        for step in range(steps):
            optimizer.zero_grad(set_to_none=to_none)
            for index in range(passes):
                x, y = (tensor[step, index, part].flatten(0, 1) for tensor in data)
                ((layers(x) - y) ** 2).mean().backward()
            optimizer.step()
        return torch.nn.utils.parameters_to_vector(layers.parameters()).detach()

    alone = train(False, slice(None))
    results = run(world, lambda: train(True, slice(hvd.rank(), hvd.rank() + 1)))
    for result in results:
        assert_equal(result, results[0])
        torch.testing.assert_close(result, alone, atol=1e-10, rtol=1e-10)
