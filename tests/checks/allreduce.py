"""All-reduce in all its forms against a float64 (or exact integer) reference."""

from __future__ import annotations

import math
from collections import Counter

import torch

import sordino.torch as hvd
from checks.reference import DTYPES, FLOATS, FOLDS, INTEGERS, LENGTHS, assert_equal, assert_reduced, values
from checks.registry import Seat, check
from sordino.runtime.context import current

EVERY = [*FOLDS.items()]


def everybody(seat: Seat, shape, dtype, seed: int = 0, wide: bool = False) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, seed, wide) for rank in range(seat.size)]


@check(dtype=DTYPES)
def every_op_and_length(seat: Seat, dtype: torch.dtype) -> None:
    """All operations are in flight at once, so small ones are fused. The input stays unchanged."""
    under_way = []
    for label, op in EVERY:
        for length in LENGTHS:
            inputs = everybody(seat, length, dtype, seed=op)
            mine = inputs[seat.rank].clone()
            under_way.append((label, op, inputs, mine, hvd.allreduce_async(mine, name=f"{label}.{length}", op=op)))
    for label, op, inputs, mine, handle in under_way:
        result = hvd.synchronize(handle)
        assert_reduced(result, op, inputs)
        assert_equal(mine, inputs[seat.rank])
        seat.same(f"{label} of {len(mine)}", result)


@check(dtype=DTYPES)
def blocking_and_in_place(seat: Seat, dtype: torch.dtype) -> None:
    for label, op in EVERY:
        inputs = everybody(seat, (7, 11), dtype, seed=op)
        seat.same(label, hvd.allreduce(inputs[seat.rank], op=op))
        mine = inputs[seat.rank].clone()
        assert hvd.allreduce_(mine, op=op) is mine
        assert_reduced(mine, op, inputs)
        again = inputs[seat.rank].clone()
        assert hvd.synchronize(hvd.allreduce_async_(again, op=op, name="again")) is again
        assert_equal(again, mine)
        seat.same(label, mine)


@check(dtype=(torch.float32, torch.bfloat16, torch.bool, torch.int64))
def megabytes(seat: Seat, dtype: torch.dtype) -> None:
    inputs = everybody(seat, 1_100_000, dtype)
    mine = inputs[seat.rank].clone()
    hvd.allreduce_(mine)
    assert_reduced(mine, hvd.Average, inputs)
    seat.same("average", mine)


@check(dtype=(torch.float16, torch.float32, torch.float64))
def odd_lengths_around_chunks(seat: Seat, dtype: torch.dtype) -> None:
    """Lengths of one element more or less than each limit: a staging chunk, a cache line, the least size for averaging
    in place, and the sizes from which two or four lanes are used between nodes."""
    width = dtype.itemsize
    for size in (64, 16 * 1024, 32 * 1024, 262144, 3 * 262144, 1 << 20, 1 << 21):
        for extra in (-1, 0, 1):
            inputs = everybody(seat, size // width + extra, dtype, seed=size + extra)
            result = hvd.allreduce(inputs[seat.rank], op=hvd.Sum)
            assert_reduced(result, hvd.Sum, inputs)
            seat.same(f"{size}{extra:+}", result)


@check(dtype=INTEGERS)
def integers_wrap_around(seat: Seat, dtype: torch.dtype) -> None:
    for _, op in [(label, op) for label, op in EVERY if op != hvd.Average]:
        inputs = everybody(seat, 1000, dtype, seed=9, wide=True)
        assert_reduced(hvd.allreduce(inputs[seat.rank], op=op), op, inputs)


@check(dtype=DTYPES, factors=((0.5, 1.0), (1.0, 0.25), (2.0, 3.0), (-1.5, 0.5)))
def scaled(seat: Seat, dtype: torch.dtype, factors: tuple[float, float]) -> None:
    pre, post = factors
    for label, op in EVERY:
        inputs = everybody(seat, (5, 13), dtype, seed=3)
        given = {"op": op, "prescale_factor": pre, "postscale_factor": post}
        result = hvd.allreduce(inputs[seat.rank], **given)
        assert_reduced(result, op, inputs, pre, post)
        seat.same(label, result)
        mine = inputs[seat.rank].clone()
        hvd.allreduce_(mine, **given)
        assert_equal(mine, result)
        assert_reduced(hvd.grouped_allreduce([inputs[seat.rank]], **given)[0], op, inputs, pre, post)


@check()
def the_average_of_equal_integers_is_that_integer(seat: Seat) -> None:
    for dtype in INTEGERS:
        mine = torch.tensor([0, 1, 2, 7, 24], dtype=dtype)
        assert_equal(hvd.allreduce(mine), mine)
    assert_equal(hvd.allreduce(torch.tensor([-1, -2 - seat.rank])), torch.tensor([-1, -((3 + seat.size) // 2)]))


@check()
def floats_of_all_kinds(seat: Seat) -> None:
    """Zeros and infinities keep their kind; NaN never gets lost."""
    for dtype in FLOATS:
        mine = torch.tensor([math.inf, -math.inf, math.nan if seat.rank == seat.last else 1.0, 0.0, -0.0], dtype=dtype)
        for label, op in EVERY:
            result = hvd.allreduce(mine, op=op)
            assert result[2].isnan(), (dtype, label, result)
            assert result[0].isinf() and result[3] == 0 and result[4] == 0, (dtype, label, result)
    big = torch.full((3,), torch.finfo(torch.float32).max)
    assert hvd.allreduce(big, op=hvd.Sum).isinf().all() == (seat.size > 1)


@check()
def no_dimensions(seat: Seat) -> None:
    for dtype in DTYPES:
        inputs = everybody(seat, (), dtype)
        for op in (hvd.Average, hvd.Sum, hvd.Max):
            result = hvd.allreduce(inputs[seat.rank], op=op)
            assert result.shape == ()
            assert_reduced(result, op, inputs)
        mine = inputs[seat.rank].clone()
        hvd.allreduce_(mine, op=hvd.Sum)
        assert_reduced(mine, hvd.Sum, inputs)


@check(dtype=(torch.float32, torch.uint8, torch.bfloat16, torch.bool))
def memory_in_any_order(seat: Seat, dtype: torch.dtype) -> None:
    """Transposed, strided, sliced and channels_last tensors; ranks need not agree on the order."""
    views = {
        "transposed": (lambda t: t.t(), (30, 70)),
        "strided": (lambda t: t[:, ::3], (40, 91)),
        "sliced": (lambda t: t[3:-2, 5:], (40, 91)),
        "channels_last": (lambda t: t.contiguous(memory_format=torch.channels_last), (2, 3, 9, 11)),
        "on some ranks": (lambda t: t.t().contiguous().t() if seat.rank % 2 else t, (33, 55)),
    }
    for label, (view, shape) in views.items():
        inputs = [view(tensor) for tensor in everybody(seat, shape, dtype)]
        result = hvd.allreduce(inputs[seat.rank], op=hvd.Sum)
        assert_reduced(result, hvd.Sum, inputs)
        base = values(seat.rank, shape, dtype).clone()
        outside = base.clone()
        mine = view(base)
        strides = mine.stride()
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        assert mine.stride() == strides
        assert_reduced(mine, hvd.Sum, inputs)
        if label == "sliced":  # the elements around the view stay as they were
            assert_equal(base[:3], outside[:3])
            assert_equal(base[:, :5], outside[:, :5])
        seat.same(label, result, mine)


@check()
def an_expanded_tensor(seat: Seat) -> None:
    inputs = [values(rank, (1, 5), torch.float32).expand(4, 5) for rank in range(seat.size)]
    assert_reduced(hvd.allreduce(inputs[seat.rank]), hvd.Average, inputs)


@check()
def groups_of_mixed_dtypes_and_shapes(seat: Seat) -> None:
    shapes = [(3,), (), (0,), (17, 3), (70001,), (2, 3, 4)]
    for _, op in EVERY:
        table = [everybody(seat, shapes[i % len(shapes)], dtype, seed=i) for i, dtype in enumerate(DTYPES)]
        mine = [inputs[seat.rank].clone() for inputs in table]
        for result, inputs in zip(hvd.grouped_allreduce(mine, op=op), table):
            assert_reduced(result, op, inputs)
        handle = hvd.grouped_allreduce_async(mine, op=op, name="async")
        for result, inputs in zip(hvd.synchronize(handle), table):
            assert_reduced(result, op, inputs)
            seat.same("async", result)
        in_place = hvd.grouped_allreduce_(mine, op=op)
        assert all(a is b for a, b in zip(in_place, mine))
        for result, inputs in zip(mine, table):
            assert_reduced(result, op, inputs)
            seat.same("in place", result)
        fresh = [inputs[seat.rank].clone() for inputs in table]
        hvd.synchronize(hvd.grouped_allreduce_async_(fresh, op=op, name="fresh"))
        for result, other in zip(fresh, mine):
            assert_equal(result, other)


@check()
def the_same_tensor_twice_in_a_group(seat: Seat) -> None:
    inputs = everybody(seat, 50, torch.float64)
    for result in hvd.grouped_allreduce([inputs[seat.rank]] * 3, op=hvd.Sum):
        assert_reduced(result, hvd.Sum, inputs)


@check()
def a_leaf_that_requires_grad_in_place(seat: Seat) -> None:
    leaf = torch.nn.Parameter(torch.full((4,), float(seat.rank)))
    assert hvd.allreduce_(leaf, op=hvd.Sum) is leaf
    assert leaf.requires_grad and leaf.is_leaf
    assert leaf.tolist() == [sum(range(seat.size))] * 4


@check(dtype=(torch.float32, torch.float64, torch.bfloat16, torch.int32))
def compressed(seat: Seat, dtype: torch.dtype) -> None:
    for compression, narrow in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        inputs = everybody(seat, 300, dtype)
        result = hvd.allreduce(inputs[seat.rank], compression=compression)
        if dtype.is_floating_point:
            assert result.dtype == dtype
            assert_reduced(result.to(narrow), hvd.Average, [tensor.to(narrow) for tensor in inputs])
        else:
            assert_reduced(result, hvd.Average, inputs)


@check()
def many_under_way(seat: Seat) -> None:
    """More operations in flight than any table has entries, a few large and most tiny, waited for in reverse order."""
    lengths = [(7 * i) % 97 + (60_000 if i % 83 == 5 else 0) for i in range(400)]
    handles = [
        hvd.allreduce_async(torch.full((length,), float(seat.rank + i)), name=f"tensor.{i}", op=hvd.Sum)
        for i, length in enumerate(lengths)
    ]
    for i, handle in reversed(list(enumerate(handles))):
        result = hvd.synchronize(handle)
        assert len(result) == lengths[i]
        assert (result == sum(rank + i for rank in range(seat.size))).all()


@check()
def the_deprecated_average_argument(seat: Seat) -> None:
    inputs = everybody(seat, 6, torch.float64)
    assert_reduced(hvd.allreduce(inputs[seat.rank], average=False), hvd.Sum, inputs)
    assert_reduced(hvd.allreduce(inputs[seat.rank], average=True), hvd.Average, inputs)
    mine = inputs[seat.rank].clone()
    hvd.allreduce_(mine, None, "positional", hvd.Max)
    assert_reduced(mine, hvd.Max, inputs)


@check()
def counters(seat: Seat) -> None:
    before = hvd.stats()
    hvd.allreduce(torch.ones(100_000))
    after = hvd.stats()
    assert after["operations"] == before["operations"] + 1
    sent = after["bytes_sent"] - before["bytes_sent"]
    if seat.size == 1:
        assert sent == 0
    else:
        # Each rank sends 2(N-1)/N of the tensor in a ring, and the whole tensor in a tree of two. On nodes with unequal
        # numbers of ranks the shares differ (checks/plan.py).
        fair = 2 * (seat.size - 1) / seat.size * 400_000
        equal = len(set(Counter(current().world.nodes).values())) == 1
        assert 0.9 * fair <= sent <= 1.1 * fair if equal else 0 < sent < 2 * fair
    assert after["exposed_seconds"] >= before["exposed_seconds"]
    inside, across = after["bytes_sent_inside_node"], after["bytes_sent_across_nodes"]
    assert after["bytes_sent"] == inside + across
    if hvd.local_size() == seat.size and seat.transport == "sim":
        assert across == 0


@check(worlds=("sim-3", "sim-4", "sim-5", "mpi-3", "mpi-4", "mpi-5"))
def one_node_folds_in_rank_order(seat: Seat) -> None:
    """Ranks of one node add in rank order, to the last bit, both in shared memory and through slots."""
    for length in (7, 5_003, 100_003):
        inputs = everybody(seat, length, torch.float32)
        wanted = inputs[0]
        for other in inputs[1:]:
            wanted = wanted + other
        assert_equal(hvd.allreduce(inputs[seat.rank], op=hvd.Sum), wanted)
        assert_equal(hvd.allreduce_(hvd.share(inputs[seat.rank].clone()), op=hvd.Sum), wanted)


@check(worlds=("sim-4x2", "mpi-4x2", "ucx-4x2"))
def a_last_part_is_short(seat: Seat) -> None:
    """Between nodes a long vector is sent in parts through memory that is reused. Values are right even if a rank
    copies a part out late.

    A vector of slightly more than 5 MiB is cut into eight parts, whose length grows with the vector, and one part with
    the rest.
    """
    for left in (1, 3, 7):
        wanted = torch.arange(1, 5 * 2**18 + left + 1, dtype=torch.float32)
        for _ in range(8):
            mine = wanted.clone()
            hvd.allreduce_(mine, op=hvd.Max, name="short")
            assert_equal(mine, wanted)
