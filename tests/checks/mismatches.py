"""Checks of ranks that disagree: all raise OperationMismatch, which names the difference. The world stays usable."""

from __future__ import annotations

from collections.abc import Callable

import torch

import sordino.torch as hvd
from checks.registry import Seat, check
from sordino._core import Opcode, Request
from sordino.errors import OperationMismatch
from sordino.runtime.context import current
from sordino.runtime.tensors import describe

# By case: call(odd, number of ranks), and words that the error must contain. `odd` is True on one rank.
CALLS: dict[str, tuple[Callable[[bool, int], object], tuple[str, ...]]] = {
    "allreduce shape": (
        lambda odd, n: hvd.allreduce_async(torch.ones(4 if odd else 3), name="m"),
        ("shape", "[3]", "[4]"),
    ),
    "allreduce rank": (
        lambda odd, n: hvd.allreduce_async(torch.ones(2, 3) if odd else torch.ones(6), name="m"),
        ("shape", "[6]", "[2, 3]"),
    ),
    "allreduce dtype": (
        lambda odd, n: hvd.allreduce_async(torch.ones(3, dtype=torch.int32 if odd else torch.float32), name="m"),
        ("dtype", "int32", "float32"),
    ),
    "allreduce op": (
        lambda odd, n: hvd.allreduce_async(torch.ones(3), name="m", op=hvd.Max if odd else hvd.Sum),
        ("reduction", "Max", "Sum"),
    ),
    "allreduce adasum": (
        lambda odd, n: hvd.allreduce_async(torch.ones(3), name="m", op=hvd.Adasum if odd else hvd.Average),
        ("reduction", "Adasum", "Average"),
    ),
    "allreduce prescale": (
        lambda odd, n: hvd.allreduce_async(torch.ones(3), name="m", prescale_factor=2.0 if odd else 1.0),
        ("prescale",),
    ),
    "allreduce postscale": (
        lambda odd, n: hvd.allreduce_async(torch.ones(3), name="m", postscale_factor=2.0 if odd else 1.0),
        ("postscale",),
    ),
    "in place shape": (lambda odd, n: hvd.allreduce_async_(torch.ones(4 if odd else 3), name="m"), ("shape",)),
    "group shape": (
        lambda odd, n: hvd.grouped_allreduce_async([torch.ones(3), torch.ones(4 if odd else 3)], name="m"),
        ("shape", "tensor 1"),
    ),
    "group first dtype": (
        lambda odd, n: hvd.grouped_allreduce_async(
            [torch.ones(3, dtype=torch.float16 if odd else torch.float64), torch.ones(3)], name="m"
        ),
        ("dtype", "tensor 0", "float16", "float64"),
    ),
    "group length": (
        lambda odd, n: hvd.grouped_allreduce_async([torch.ones(3)] * (3 if odd else 2), name="m"),
        ("number of tensors",),
    ),
    "allgather columns": (lambda odd, n: hvd.allgather_async(torch.ones(2, 4 if odd else 3), name="m"), ("shape",)),
    "allgather dimensions": (
        lambda odd, n: hvd.allgather_async(torch.ones(2, 3, 1) if odd else torch.ones(2, 3), name="m"),
        ("shape",),
    ),
    "allgather dtype": (
        lambda odd, n: hvd.allgather_async(torch.ones(2, dtype=torch.bool if odd else torch.uint8), name="m"),
        ("dtype", "bool", "uint8"),
    ),
    "grouped allgather": (
        lambda odd, n: hvd.grouped_allgather_async([torch.ones(2)] * (2 if odd else 1), name="m"),
        ("number",),
    ),
    "broadcast root": (
        lambda odd, n: hvd.broadcast_async(torch.ones(3), n - 1 if odd else 0, name="m"),
        ("root", "0", "against"),
    ),
    "broadcast shape": (lambda odd, n: hvd.broadcast_async(torch.ones(4 if odd else 3), 0, name="m"), ("shape",)),
    "broadcast dtype": (
        lambda odd, n: hvd.broadcast_async_(torch.ones(3, dtype=torch.half if odd else torch.bfloat16), 0, name="m"),
        ("dtype",),
    ),
    "alltoall columns": (lambda odd, n: hvd.alltoall_async(torch.ones(n, 4 if odd else 3), name="m"), ("shape",)),
    "alltoall dtype": (
        lambda odd, n: hvd.alltoall_async(torch.ones(n, dtype=torch.half if odd else torch.int16), name="m"),
        ("dtype",),
    ),
    "reducescatter rows": (lambda odd, n: hvd.reducescatter_async(torch.ones(n + odd), name="m"), ("shape",)),
    "reducescatter dtype": (
        lambda odd, n: hvd.reducescatter_async(torch.ones(n, dtype=torch.half if odd else torch.float), name="m"),
        ("dtype",),
    ),
    "reducescatter op": (
        lambda odd, n: hvd.reducescatter_async(torch.ones(n), name="m", op=hvd.Sum if odd else hvd.Average),
        ("Sum", "Average"),
    ),
    "reducescatter prescale": (
        lambda odd, n: hvd.reducescatter_async(torch.ones(n), name="m", prescale_factor=3 if odd else 1),
        ("prescale",),
    ),
}


def expect_mismatch(call: Callable[[], object], words: tuple[str, ...]) -> str:
    try:
        call()
    except OperationMismatch as error:
        assert isinstance(error, ValueError) and isinstance(error, hvd.HorovodInternalError)
        for word in words:
            assert word in str(error), f"{error} does not say {word}"
        return str(error)
    raise AssertionError("ranks disagree, and nothing was raised")


@check(least=2, what=CALLS, who=("the first", "the last"))
def disagreement(seat: Seat, what: str, who: str) -> None:
    call, words = CALLS[what]
    odd = seat.rank == (0 if who == "the first" else seat.last)
    bystander = hvd.allreduce_async(torch.full((500,), float(seat.rank)), name="bystander", op=hvd.Sum)
    for _ in range(2):  # the name is free again after the error
        text = expect_mismatch(lambda: hvd.synchronize(call(odd, seat.size)), (*words, ".m'", "rank 0"))
        assert f"rank {seat.last}" in text or f"rank {1}" in text
        seat.same("error", text)
    assert (hvd.synchronize(bystander) == sum(range(seat.size))).all()
    after = hvd.synchronize(call(False, seat.size))
    assert after is not None
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == seat.size


@check(least=2)
def all_ranks_different_and_unnamed(seat: Seat) -> None:
    """Counters of unnamed operations stay equal on all ranks after failures."""
    expect_mismatch(lambda: hvd.allreduce(torch.ones(17 + seat.rank)), ("shape",))
    expect_mismatch(lambda: hvd.allgather(torch.ones(2, 1 + seat.rank)), ("shape",))
    expect_mismatch(lambda: hvd.broadcast(torch.ones(2), seat.rank), ("root",))
    expect_mismatch(
        lambda: hvd.allreduce_(torch.ones(2, dtype=(torch.int32, torch.float32)[seat.rank % 2])), ("dtype",)
    )
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [seat.size] * 2
    assert hvd.broadcast(torch.tensor(seat.rank), 0).item() == 0


@check(least=2)
def the_input_survives(seat: Seat) -> None:
    mine = torch.arange(3.0 + seat.rank)
    expect_mismatch(lambda: hvd.allreduce_(mine), ("shape",))
    assert mine.tolist() == list(range(3 + seat.rank))


@check(least=2)
def different_kinds_of_operation(seat: Seat) -> None:
    """In sordino.torch a name begins with the kind of operation, so only lower-level calls can collide like this."""
    tensor = torch.ones(2)
    opcode = Opcode.BROADCAST if seat.rank == 0 else Opcode.ALLREDUCE
    request = Request(int(opcode), "raw", [describe(tensor, tensor)], keep=tensor)
    handle = current().world.submit(request)
    expect_mismatch(handle.wait, ("raw", "broadcast", "allreduce"))
    assert hvd.allreduce(torch.ones(1)).item() == 1


@check(least=2)
def many_at_once_among_good_ones(seat: Seat) -> None:
    handles = [
        hvd.allreduce_async(torch.ones(2 + (i % 3 == 0) * seat.rank), name=f"{i}", op=hvd.Sum) for i in range(30)
    ]
    for i, handle in enumerate(handles):
        if i % 3 == 0:
            expect_mismatch(lambda handle=handle: hvd.synchronize(handle), (f"'allreduce.{i}'",))
        else:
            assert hvd.synchronize(handle).tolist() == [seat.size] * 2


@check(least=2)
def different_process_sets(seat: Seat) -> None:
    expect_mismatch(lambda: hvd.add_process_set([seat.rank]), ("ranks",))
    made = hvd.add_process_set([0])
    assert made.ranks == [0] and hvd.remove_process_set(made)
