"""Data-parallel regression in arrays that are no tensors: CuPy's where there is a GPU, otherwise NumPy's.

  sordino run -np 4 -- python examples/arrays.py

Every collective takes arrays by DLPack, without a copy, and returns tensors; `from_dlpack` makes arrays of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

import sordino.torch as hvd


def library(stack: ExitStack) -> Any:
    """Return CuPy, with its stream as PyTorch's current one, or NumPy."""
    if torch.cuda.is_available():
        import cupy

        cupy.cuda.Device(hvd.local_rank() % torch.cuda.device_count()).use()
        torch.cuda.set_device(cupy.cuda.Device().id)
        # Operations are ordered with PyTorch's current stream, so both libraries should use the same stream.
        stream = stack.enter_context(cupy.cuda.Stream(non_blocking=True))
        stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        return cupy
    import numpy

    return numpy


def main() -> None:
    """Fit a line by gradient descent; each rank has its own points."""
    hvd.init()
    with ExitStack() as stack:
        arrays = library(stack)
        random = arrays.random.RandomState(hvd.rank())
        x = random.standard_normal((1000, 3))
        y = x @ arrays.asarray([1.0, -2.0, 0.5]) + 0.01 * random.standard_normal(1000)
        weights = arrays.zeros(3)
        for _ in range(100):
            gradient = x.T @ (x @ weights - y) / len(y)
            hvd.allreduce_(gradient, name="gradient")  # the mean over the ranks, in place
            weights -= 0.5 * gradient
        losses = arrays.from_dlpack(hvd.allgather(((x @ weights - y) ** 2).mean().reshape(1)))
        if hvd.rank() == 0:
            print(f"{arrays.__name__}: weights {weights.round(3).tolist()}, losses {losses.round(6).tolist()}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
