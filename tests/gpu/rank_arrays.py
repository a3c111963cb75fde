"""Collectives of arrays that are no tensors, by DLPack in both directions: CuPy's on a GPU, NumPy's on a simulated one.
Results are tensors on the same device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from checks.moving import rows
from checks.reference import assert_equal, assert_reduced, values
from rank_operations import inputs
from rank_seat import LeftOut, Seat, check

import sordino.torch as hvd


def module(seat: Seat) -> Any:
    """Return CuPy or NumPy."""
    if seat.device.type != "cuda":
        import numpy

        return numpy
    try:
        import cupy
    except ImportError:
        raise LeftOut("CuPy is not installed") from None
    return cupy


def put(seat: Seat, tensor: torch.Tensor) -> Any:
    """Return an array on the device with a copy of a tensor's values."""
    return module(seat).array(tensor.numpy())


def host(array: Any) -> torch.Tensor:
    """Return an array's values."""
    return torch.from_numpy((array.get() if hasattr(array, "get") else array).copy())


@check()
def every_collective_takes_arrays(seat: Seat) -> None:
    last = seat.last
    for dtype in (torch.float32, torch.float64, torch.int32):
        given = inputs(seat, (2 * seat.size, 1001), dtype)
        mine = put(seat, given[seat.rank])
        result = hvd.allreduce(mine, op=hvd.Sum)
        assert result.device == seat.device
        assert_reduced(host(module(seat).from_dlpack(result)), hvd.Sum, given)
        assert_equal(host(mine), given[seat.rank])
        for one in hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum):
            assert_reduced(one.cpu(), hvd.Sum, [tensor[: len(one)] for tensor in given])
        assert_equal(hvd.allgather(mine[: seat.rank + 1]).cpu(), rows(*(one[: k + 1] for k, one in enumerate(given))))
        assert_equal(hvd.broadcast(mine, root_rank=last).cpu(), given[last])
        assert_equal(hvd.alltoall(mine).cpu(), rows(*(one[2 * seat.rank : 2 * seat.rank + 2] for one in given)))
        begin = 2 * seat.rank
        assert_reduced(
            hvd.reducescatter(mine, op=hvd.Sum).cpu(), hvd.Sum, [tensor[begin : begin + 2] for tensor in given]
        )
        hvd.allreduce_(mine, op=hvd.Sum)
        assert_reduced(host(mine), hvd.Sum, given)
        fresh = put(seat, given[seat.rank])
        hvd.synchronize(hvd.broadcast_async_(fresh, root_rank=0))
        assert_equal(host(fresh), given[0])


@check()
def arrays_of_another_stream(seat: Seat) -> None:
    """Inputs and outputs are ordered with the stream on which the caller uses the array."""
    arrays = module(seat)
    count = 2_000_003 if seat.gpu is None else 20_003
    with ExitStack() as stack:
        if seat.device.type == "cuda":
            stream = stack.enter_context(arrays.cuda.Stream(non_blocking=True))
            stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        for turn in range(4):
            given = [values(rank, count, torch.float32, seed=turn) for rank in range(seat.size)]
            mine = put(seat, given[seat.rank])
            if seat.device.type == "cuda":
                torch.cuda._sleep(20_000_000)
            mine *= 2
            hvd.allreduce_(mine, name=f"in place {turn}", op=hvd.Sum)
            mine /= 2
            assert_reduced(host(mine), hvd.Sum, given)
    if seat.device.type == "cuda":
        # DLPack orders a new tensor or array behind the other library's current stream.
        with arrays.cuda.Stream(non_blocking=True):
            mine = put(seat, given[seat.rank]) * 2
            result = arrays.from_dlpack(hvd.allreduce(mine, name="apart", op=hvd.Sum)) / 2
            assert_reduced(host(result), hvd.Sum, given)
