"""Rollback of an exchange in which a rank is lost, from copies of the tensors that are made before the exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sordino.runtime.collectives.autograd import grouped_allreduce
from sordino.runtime.collectives.operation import Average
from sordino.runtime.context import Context
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.recovery.losses import LOSSES


class Rollback:
    """Copies of tensors before the exchange in progress. Makes no copies if ranks do not survive losses."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # tensors and their copies
        self._room: list[torch.Tensor] = []

    @contextmanager
    def around(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Copy tensors, so that `go_back()` can restore them if a rank is lost within the block."""
        if not self._context.survives_losses:
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
        """Restore the tensors if a loss has interrupted the block.

        Args:
            over_them: parameters and buffers that are views of these tensors. They get new memory, because data of the
                abandoned exchange may still arrive in the old one.
        """
        if self._under_way is None:
            return
        kept, self._under_way = self._under_way, None
        for tensor, value in kept:
            tensor.data.copy_(value)
        for tensor in over_them:
            tensor.data = _value_of(tensor.data, kept).clone()


def _value_of(view: torch.Tensor, kept: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the kept value of a view of a tensor that was copied; the view itself if there is none.

    It is not read from the tensor's own memory, to which a rank that was taken for lost may be writing.
    """
    for tensor, value in kept:
        begin = view.data_ptr() - tensor.data_ptr()
        alike = value.stride() == tensor.stride() and value.dtype == view.dtype
        if alike and begin >= 0 and begin + view.nbytes <= tensor.nbytes:
            return value.as_strided(view.shape, view.stride(), begin // view.itemsize)
    return view


@torch.no_grad()
def take_mean(tensors: Sequence[torch.Tensor], name: str, process_set: ProcessSet) -> None:
    """Replace tensors by their mean over a process set. Collective over it.

    The mean is computed in separate memory, because an abandoned exchange may still write to its memory.
    """
    means = grouped_allreduce(list(tensors), op=Average, name=name, process_set=process_set)
    for tensor, mean in zip(tensors, means):
        tensor.data.copy_(mean)  # by .data, so that autograd graphs that need a tensor stay usable
