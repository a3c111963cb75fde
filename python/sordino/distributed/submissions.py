"""Submission of the operations of a process group to the core.

Ordinary CPU tensors go directly to the core's function for repeated operations (`Context.repeat`); others, such as CUDA
tensors, go through `sordino.runtime.collectives`. Both match the operations of ranks by their order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sordino._core import Handle
from sordino.distributed.results import Rows, fill, fill_from
from sordino.distributed.work import Part
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives import ops
from sordino.runtime.collectives.operation import synchronize
from sordino.runtime.context import Context, use
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.views import movable

Parts = list[Part]


class Submissions:
    """Submits operations of a process set.

    Attributes:
        size: number of ranks of the set.
        rank: number of this rank in the set.

    Args:
        context: the context of this rank.
        process_set: the set.
    """

    def __init__(self, context: Context, process_set: ProcessSet = global_process_set) -> None:
        self._context, self._set = context, process_set
        with use(context):
            self._ranks = list(process_set.ranks or [])
        self.size, self.rank = len(self._ranks), self._ranks.index(context.rank)

    def _synchronize(self, handle: int) -> Any:
        with use(self._context):
            return synchronize(handle)

    def _in_place(
        self, code: int, tensor: torch.Tensor, waits: bool, options: tuple[Any, ...], start: Callable[..., int]
    ) -> Parts:
        """Submit an operation whose result replaces its input."""
        repeat, set_id = self._context.repeat, self._set.process_set_id
        begun = repeat(code, waits, tensor, tensor, None, set_id, *options)
        if begun is None:  # such as a parameter, or a complex tensor
            plain = movable(tensor.detach())
            begun = repeat(code, waits, plain, plain, None, set_id, *options)
        if begun is None:
            with use(self._context):
                return self._parts_of(start(plain, process_set=self._set, **_named(code, options)), waits)
        return [] if waits else [Part(begun[0].done, begun[0].wait)]

    def _into(
        self,
        output: torch.Tensor,
        shape: tuple[int, ...],
        code: int,
        source: torch.Tensor,
        waits: bool,
        options: tuple[Any, ...],
        rows: Rows | None = None,
    ) -> Parts:
        """Submit an operation whose result, of this shape, goes into another tensor. `rows`: rows of each rank."""
        if output.dtype != source.dtype:
            raise UsageError(f"the input is {source.dtype}, and the output {output.dtype}; both must be the same")
        plain = movable(source.detach().resolve_conj() if source.is_complex() else source.detach()).contiguous()
        given = output.detach()
        whole = given.view(shape) if given.is_contiguous() else given.new_empty(shape)
        place = movable(whole)
        # A handle has the numbers of rows that the ranks have sent. If the caller waits, the core returns one only if
        # these numbers differ.
        blocks = waits and (rows is None or rows.are_equal)
        begun = self._context.repeat(code, blocks, plain, place, None, self._set.process_set_id, *options)
        if begun is None:
            with use(self._context):
                handle = _START[code](plain, process_set=self._set, **_named(code, options))
            parts: Parts = [Part(partial(self._is_done, handle), partial(self._put, handle, place, rows))]
            parts = self._waited(parts, waits)
        elif blocks:
            parts = []
            if type(begun) is Handle:  # the core has allocated the result
                fill_from(begun, place, rows)
        else:
            handle = begun[0]
            parts = self._waited([Part(handle.done, handle.wait, lambda: fill_from(handle, place, rows))], waits)
        if given.is_contiguous():
            return parts
        return self._then(parts, lambda: given.copy_(whole.view_as(given)))

    def _put(self, handle: int, place: torch.Tensor, rows: Rows | None) -> None:
        pending = self._context.pending.find(handle)
        result = self._synchronize(handle)
        if rows is not None and pending is not None:
            rows.compare(pending.handle.rows)
        fill(place, result[0] if isinstance(result, tuple) else result)

    def _is_done(self, handle: int) -> bool:
        pending = self._context.pending.find(handle)
        return pending is not None and pending.handle.done()  # None: another thread is waiting for it

    def _parts_of(self, handle: int, waits: bool) -> Parts:
        return self._waited([Part(partial(self._is_done, handle), partial(self._synchronize, handle))], waits)

    @staticmethod
    def _waited(parts: Parts, waits: bool) -> Parts:
        if not waits:
            return parts
        for part in parts:
            part.complete()
        return []

    @staticmethod
    def _then(parts: Parts, finish: Callable[[], object]) -> Parts:
        """Return parts that call `finish` when they have ended. Call it now if there are no parts."""
        if not parts:
            finish()
            return []
        last = parts[-1]
        return [*parts[:-1], Part(last.is_done, last.complete, finish)]


_START: dict[int, Callable[..., int]] = {
    opcode.ALLGATHER: ops.allgather_async,
    opcode.ALLTOALL: ops.alltoall_async,
    opcode.REDUCESCATTER: ops.reducescatter_async,
}


def _named(code: int, options: tuple[Any, ...]) -> dict[str, Any]:
    """Return the options of `Context.repeat` as keywords of the asynchronous functions."""
    if code in (opcode.ALLREDUCE, opcode.REDUCESCATTER):
        return {"op": options[0], "prescale_factor": options[1]}
    return {"splits": options[4]} if code == opcode.ALLTOALL else {}
