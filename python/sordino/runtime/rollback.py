"""An exchange in which a rank is lost has not taken place: what it changes is copied before, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sordino.runtime.autograd import grouped_allreduce
from sordino.runtime.context import Context
from sordino.runtime.operation import Average
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery import LOSSES


class Rollback:
    """Tensors as they were before what is under way. Costs nothing where a loss ends the job."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # what is changed, and copies
        self._room: list[torch.Tensor] = []

    @contextmanager
    def around(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Have `go_back()` undo what is done to these within the block, if a rank is lost in it."""
        if not self._context.outlasts:
            yield
            return
        self._keep(tensors)
        try:
            yield
        except LOSSES:
            raise
        except BaseException:
            self._under_way = None
            raise
        self._under_way = None

    @torch.no_grad()
    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        alike = [(tensor.shape, tensor.dtype) for tensor in tensors] == [(r.shape, r.dtype) for r in self._room]
        if not alike:
            self._room = [torch.empty_like(tensor) for tensor in tensors]
        self._under_way = [(tensor, room.copy_(tensor)) for tensor, room in zip(tensors, self._room)]

    def go_back(self, over_them: Iterable[torch.Tensor]) -> None:
        """Undo what a loss has interrupted, if it has interrupted anything.

        Args:
            over_them: parameters and buffers in the memory of those tensors. They get memory of their own, for what has
                been given up may still arrive in the old one.
        """
        if self._under_way is None:
            return
        for tensor, value in self._under_way:
            tensor.data.copy_(value)
        self._under_way = None
        for tensor in over_them:
            tensor.data = tensor.data.clone()


@torch.no_grad()
def take_mean(tensors: Sequence[torch.Tensor], name: str, process_set: ProcessSet) -> None:
    """Give the ranks of a set the mean of their tensors. Collective over it.

    Ranks write to memory of its own until it is known: an exchange that is given up may go on there.
    """
    means = grouped_allreduce(list(tensors), op=Average, name=name, process_set=process_set)
    for tensor, mean in zip(tensors, means):
        tensor.data.copy_(mean)  # a graph that is to be differentiated yet takes it as it is
