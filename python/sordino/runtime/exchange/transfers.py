"""Collectives that means of compressed values use (compressed_mean.py, low_rank_mean.py), over any ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from sordino.runtime.collectives.operation import Average, synchronize
from sordino.runtime.collectives.ops import allgather_async, allreduce_async, alltoall_async
from sordino.runtime.process_set import ProcessSet

Received = Callable[[], torch.Tensor]
"""Function that waits for a collective, and returns its result or raises its error. It is called once."""


class Transfers(Protocol):
    """The collectives of some ranks that a mean needs.

    The first two take contiguous uint8 tensors of any device, which must not change until the result is there. Results
    are on the same device.
    """

    size: int
    """Number of ranks."""
    place: int
    """Number of this rank among them, from 0 on."""

    def all_to_all(self, sent: torch.Tensor) -> Received:
        """Start to send the n-th part of `sent` to rank n. The result's n-th part is what rank n has sent here."""
        ...

    def all_gather(self, sent: torch.Tensor) -> Received:
        """Start to send `sent` to all ranks. The result's n-th part is what rank n has sent."""
        ...

    def all_reduce(self, sent: torch.Tensor, part: str) -> Received:
        """Start to average contiguous float32 tensors of any device, in float32.

        Args:
            sent: the tensor of this rank, which must not change until the result is there.
            part: a name; operations that repeat with the same name have tensors of the same size.

        Returns:
            function that returns the mean, with the same bits on all ranks, in a new tensor.
        """
        ...


class SetTransfers:
    """The collectives of a process set.

    Args:
        name: name of the operations, the same on all ranks.
        process_set: the ranks.
    """

    def __init__(self, name: str, process_set: ProcessSet) -> None:
        self._name, self._process_set = name, process_set
        self.size = len(process_set.ranks or [])
        self.place = (process_set.rank() or 0) if process_set.included() else 0

    def all_to_all(self, sent: torch.Tensor) -> Received:
        handle = alltoall_async(sent, name=f"{self._name}.scatter", process_set=self._process_set)
        return lambda: synchronize(handle)[0]

    def all_gather(self, sent: torch.Tensor) -> Received:
        handle = allgather_async(sent, f"{self._name}.gather", self._process_set)
        return lambda: synchronize(handle)

    def all_reduce(self, sent: torch.Tensor, part: str) -> Received:
        handle = allreduce_async(sent, name=f"{self._name}.{part}", op=Average, process_set=self._process_set)
        return lambda: synchronize(handle)
