"""Operations of torch.distributed on ranks that are threads: dtypes that the core does not know, and wrong sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from sordino import sim
from sordino.distributed.collectives import Collectives
from sordino.distributed.submissions import Parts
from sordino.errors import UsageError
from sordino.runtime.context import current

NUMBERS = [torch.complex64, torch.complex128, torch.float8_e4m3fn]


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(1 + 10 * rank, 1 + 10 * rank + count, dtype=torch.float32)
    return (numbers * (1 + 2j)).to(dtype) if dtype.is_complex else numbers.to(dtype)


def bits(tensor: torch.Tensor) -> list[object]:
    return tensor.to(torch.complex128).reshape(-1).tolist()


def over(parts: Parts) -> None:
    for part in parts:
        part.complete()


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "later"])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_complex_numbers_and_float8_are_moved(dtype: torch.dtype, waits: bool) -> None:
    def work() -> None:
        do = Collectives(current())
        size, me = do.size, do.rank
        given = [values(rank, 2 * size, dtype) for rank in range(size)]
        mine, parts = given[me], [torch.empty(2, dtype=dtype) for _ in range(size)]
        for _ in range(3):  # an operation may be a repetition from its second time on
            tensor = mine.clone()
            over(do.broadcast(tensor, 1, waits))
            assert bits(tensor) == bits(given[1])
            turned = torch.empty(size, 2 * size, 2, dtype=dtype)[..., 0]  # not row-major
            over(do.all_gather(turned, mine, waits))
            assert bits(turned) == bits(torch.cat(given))
            over(do.all_to_all_list(parts, list(mine.split(2)), waits))
            wanted = [one[2 * me : 2 * me + 2] for one in given]
            assert list(map(bits, parts)) == list(map(bits, wanted))
            output = torch.empty(2 * size, dtype=dtype)
            over(do.all_to_all(output, mine, None, None, waits))
            assert bits(output) == bits(torch.cat(wanted))
            outputs = [torch.empty(2 * size, dtype=dtype) for _ in range(size)] if me == 0 else []
            over(do.gather(outputs, mine, 0, waits))
            assert list(map(bits, outputs)) == (list(map(bits, given)) if me == 0 else [])
            leaf = torch.zeros(2, dtype=dtype, requires_grad=True)
            over(do.scatter(leaf, list(given[2].split(2)) if me == 2 else [], 2, waits))
            assert bits(leaf.detach()) == bits(given[2][2 * me : 2 * me + 2])
        received = torch.empty(2 * size, dtype=dtype)
        taken, _ = do.receive(received, (me + 1) % size, 5)
        over(do.send(mine, (me - 1) % size, 5))
        over(taken)
        assert bits(received) == bits(given[(me + 1) % size])

    sim.run(3, work)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_are_added_up(dtype: torch.dtype) -> None:
    def work() -> None:
        do = Collectives(current())
        given = [values(rank, 4, dtype) for rank in range(2)]
        for op, share in ((ReduceOp(ReduceOp.SUM), 1), (ReduceOp(ReduceOp.AVG), 2)):
            wanted = sum(one.to(torch.complex128) for one in given) / share
            tensor = given[do.rank].clone()
            over(do.all_reduce(tensor, op, False))
            assert bits(tensor) == bits(wanted)
            together = [given[do.rank].clone(), torch.ones(3)]
            over(do.all_reduce_together(together, op, True))
            assert bits(together[0]) == bits(wanted) and together[1].tolist() == [2 / share] * 3
            tensor = given[do.rank].clone()
            over(do.reduce(tensor, 1, op, True))
            assert bits(tensor) == bits(wanted if do.rank == 1 else given[0])
            output = torch.empty(2, dtype=dtype)
            over(do.reduce_scatter(output, given[do.rank].conj(), op, True))
            assert bits(output) == bits(wanted.conj()[2 * do.rank : 2 * do.rank + 2])

    sim.run(2, work)


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "later"])
def test_a_rank_may_have_no_rows_in_an_all_to_all(waits: bool) -> None:
    """An expert without tokens sends and receives no rows. Its input may be a vector without elements."""

    def work() -> None:
        do = Collectives(current())
        idle = do.rank == 1
        splits = [0, 0, 0] if idle else [1, 0, 1]
        for shape in ((0, 40), (0, 2, 20), (0,)):
            source = torch.empty(shape) if idle else torch.full((2, 40), do.rank + 1.0)
            output = torch.empty(0, 40) if idle else torch.empty(2, 40)
            over(do.all_to_all(output, source, splits, splits, waits))
            assert idle or output.tolist() == [[1.0] * 40, [3.0] * 40]

    sim.run(3, work)


def test_sizes_are_compared_in_each_repetition() -> None:
    def work() -> None:
        do = Collectives(current())
        splits = [3, 1] if do.rank == 0 else [1, 3]
        for _ in range(4):
            with pytest.raises((UsageError, ValueError), match=r"has sent [13] rows; the output has 2 for it"):
                over(do.all_to_all(torch.empty(4, 1), torch.ones(4, 1), None, splits, True))

    sim.run(2, work)


def test_wrong_sizes_and_types_are_refused() -> None:
    """They are refused before or after the operation, and nothing is written to the outputs."""
    complex_one, float8 = torch.ones(2, dtype=torch.complex64), torch.ones(3, dtype=torch.float8_e4m3fn)

    def work() -> None:
        do = Collectives(current())
        me, outputs = do.rank, [torch.zeros(4) for _ in range(3)]

        def refuse(text: str, call: Callable[..., Parts], *arguments: Any) -> None:
            with pytest.raises((UsageError, ValueError), match=text):
                over(call(*arguments))
            assert not any(output.any() for output in outputs)

        for waits in (True, False, True):
            # Sizes 3, 4 and 5: as many elements together as the outputs have.
            source = torch.ones(3 + me)
            if me != 1:
                refuse("the output for this rank", do.all_gather_list, outputs, source, waits)
            rooms = [torch.zeros(count) for count in ((3, 5, 4) if me == 0 else (3, 4, 5))]
            rows = [torch.ones(count) for count in (3 + me, 4, 5 - me)]  # to rank r
            splits = [2, 3, 4] if me == 0 else [3 + me] * 3
            whole = torch.zeros(sum(splits))
            if me == 0:
                refuse(
                    "all_gather: rank 1 has sent 4 elements; the output has 5", do.all_gather_list, rooms, source, waits
                )
                refuse("gather: rank 0 has sent 3 elements", do.gather, outputs, source, 0, waits)
                refuse("all_to_all: rank 0 has sent 3 elements", do.all_to_all_list, outputs, rows, waits)
                text = "all_to_all: rank 0 has sent 3 rows; the output has 2 for it"
                refuse(text, do.all_to_all, whole, torch.ones(12), splits, [3, 4, 5], waits)
            else:
                over(do.all_gather_list(rooms, source, waits))
                over(do.gather([], source, 0, waits))
                over(do.all_to_all_list([torch.zeros(4 if me == 1 else 5 - one) for one in range(3)], rows, waits))
                over(do.all_to_all(whole, torch.ones(12), splits, [3, 4, 5], waits))
        # Ranks that have sent equally many elements, or the same numbers of elements before, send other numbers.
        for sizes in ([4, 4, 4], [4, 2, 6]):
            for waits in (True, True, True, False):
                over(do.all_gather_list([torch.zeros(count) for count in sizes], torch.ones(sizes[me]), waits))
            if me == 0:
                text = "all_gather: rank 1 has sent 2 elements; the output has 4"
                refuse(text, do.all_gather_list, outputs, torch.ones(4), True)
            else:
                over(do.all_gather_list([torch.zeros(count) for count in (4, 2, 6)], torch.ones([4, 2, 6][me]), True))
        ones, total = [torch.ones(1)] * 4, ReduceOp(ReduceOp.SUM)
        refuse("2 outputs; there must be one for each of 3", do.all_gather_list, outputs[:2], outputs[0], True)
        refuse("4 inputs", do.all_to_all_list, outputs, ones, True)
        refuse("2 outputs", do.all_to_all_list, outputs[:2], ones[:3], True)
        parts = [torch.ones(count) for count in (4, 5, 3)]
        refuse("the input for rank 1 has 5", do.reduce_scatter_list, outputs[0], parts, total, True)
        refuse("output splits", do.all_to_all, torch.zeros(3), torch.ones(3), [1, 1, 2], [1, 1, 1], True)
        refuse("output cannot be divided", do.all_to_all, torch.zeros(4), torch.ones(3), None, None, True)
        refuse("SUM or AVG", do.all_reduce, complex_one, ReduceOp(ReduceOp.PRODUCT), True)
        refuse("SUM or AVG", do.all_reduce_together, [complex_one, complex_one], ReduceOp(ReduceOp.MAX), True)
        refuse("not reduced", do.all_reduce, float8, total, True)
        refuse("not reduced", do.reduce_scatter, float8[:1], float8, total, True)
        refuse("conjugated", do.broadcast, complex_one.conj(), 0, True)
        tensor = torch.ones(2)
        over(do.all_reduce(tensor, total, True))
        assert tensor.tolist() == [3.0] * 2

    sim.run(3, work)


def test_integers_in_sparse_tensors() -> None:
    """Large integers keep all their digits, and an average is the truncated quotient of the sum."""

    def work() -> None:
        do = Collectives(current())
        large = 2**53 + 1
        for kind, wanted in ((ReduceOp.SUM, [2 * large + 1, -1, 3]), (ReduceOp.AVG, [large, 0, 1])):
            numbers = torch.tensor([large + do.rank, -do.rank, 1 + do.rank])
            tensor = torch.sparse_coo_tensor(torch.tensor([[0, 2, 3]]), numbers, (4,), check_invariants=True)
            over(do.all_reduce(tensor, ReduceOp(kind), False))
            assert tensor.to_dense().tolist() == [wanted[0], 0, *wanted[1:]]

    sim.run(2, work)
