"""The operations of torch.distributed in terms of this library's own, for one process set.

Each operation takes its tensors as torch.distributed passes them, and returns the parts that are still under way
(`Part`): none, if the caller waits or the operation is over at once. Ordinary CPU tensors go straight to the core's
function for repeated operations (`Context.repeat`); others, such as CUDA tensors, by `sordino.runtime.collectives`.
Both match the operations of ranks by their order.

| torch.distributed | here |
|---|---|
| all_reduce; SUM, AVG, MIN, MAX, PRODUCT, PREMUL_SUM | all-reduce in place, with a factor |
| the same; BAND, BOR, BXOR | all-gather, then the ranks' tensors are combined here |
| all_reduce of a sparse tensor; SUM, AVG | all-gathers of the indices and of the values, then a sum of both here |
| broadcast, all_gather_*, all_to_all_*, barrier | the operation of that name |
| reduce_scatter_* | reduce-scatter of rows, one for each rank; bitwise: all-to-all, then combined here |
| gather, scatter | all-to-all in which only the root receives, or sends |
| send, recv, isend, irecv; from any source | a message with that tag |
| reduce | all-reduce; ranks other than the root reduce a copy, and their tensors stay as they are |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from sordino._core import Handle
from sordino.distributed.reductions import BITWISE, OPS, Kinds, combined, kind_of
from sordino.distributed.results import fill, fill_from, spread
from sordino.distributed.work import Part
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives import ops
from sordino.runtime.collectives.joining import barrier
from sordino.runtime.collectives.operation import Sum, synchronize
from sordino.runtime.collectives.point_to_point import recv_async, send_async
from sordino.runtime.context import Context, use
from sordino.runtime.process_set import ProcessSet, global_process_set

Parts = list[Part]


class Collectives:
    """The operations of a process set. Roots are numbers within the set."""

    def __init__(self, context: Context, process_set: ProcessSet = global_process_set) -> None:
        self._context, self._set = context, process_set
        with use(context):
            self._ranks = list(process_set.ranks or [])
        self.size, self.rank = len(self._ranks), self._ranks.index(context.rank)

    # ---- with arithmetic -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any, waits: bool) -> Parts:
        """Reduce a tensor in place."""
        kind, factor = kind_of(op)
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, kind, factor, waits)
        if kind in BITWISE:
            gathered = tensor.new_empty((self.size, tensor.numel()))
            return self._then(
                self.all_gather(gathered, tensor, waits),
                lambda: tensor.copy_(combined(kind, gathered).view_as(tensor)),
            )
        return self._in_place(opcode.ALLREDUCE, tensor, waits, (OPS[kind], factor), ops.allreduce_async_)

    def _all_reduce_sparse(self, tensor: torch.Tensor, kind: Any, factor: float, waits: bool) -> Parts:
        """Reduce a sparse COO tensor in place. Ranks may have different numbers of entries."""
        if kind not in (Kinds.SUM, Kinds.AVG):
            raise UsageError(f"all_reduce of a sparse tensor: the reduction must be SUM or AVG, not {kind}")
        scale = factor / self.size if kind == Kinds.AVG else factor
        given = tensor.detach().coalesce()
        with use(self._context):
            handles = [
                ops.allgather_async(entries, process_set=self._set)
                for entries in (given.indices().t().contiguous(), given.values())
            ]

        def wait() -> None:
            indices, values = (self._synchronize(handle) for handle in handles)
            total = torch.sparse_coo_tensor(indices.t(), values * scale, tensor.shape, dtype=tensor.dtype)
            with torch.no_grad():
                tensor.copy_(total.coalesce())

        return self._waited([Part(lambda: all(map(self._is_done, handles)), wait)], waits)

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], op: Any, waits: bool) -> Parts:
        """Reduce several tensors in place, as one operation where the reduction allows it."""
        kind, factor = kind_of(op)
        if len(tensors) == 1 or kind in BITWISE or any(tensor.is_sparse for tensor in tensors):
            return [part for tensor in tensors for part in self.all_reduce(tensor, op, waits)]
        with use(self._context):
            handle = ops.grouped_allreduce_async_(
                list(tensors), op=OPS[kind], prescale_factor=factor, process_set=self._set
            )
        return self._parts_of(handle, waits)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any, waits: bool) -> Parts:
        """Reduce a tensor; only the root's is changed."""
        return self.all_reduce(tensor if self.rank == root else tensor.clone(), op, waits)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor, op: Any, waits: bool) -> Parts:
        """Reduce a tensor with one part for each rank, of the output's size; each rank gets its part."""
        size = self.size
        if source.numel() != size * output.numel():
            raise UsageError(
                f"reduce_scatter: the input has {source.numel()} elements, and must have {size} times the output's "
                f"{output.numel()}"
            )
        kind, factor = kind_of(op)
        rows = source.reshape(size, output.numel())
        if kind in BITWISE:
            received = torch.empty_like(rows)
            moved = self.all_to_all(received, rows, None, None, waits)
            return self._then(moved, lambda: output.copy_(combined(kind, received).view_as(output)))
        return self._into(output, (1, output.numel()), opcode.REDUCESCATTER, rows, waits, (OPS[kind], factor))

    # ---- without ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int, waits: bool) -> Parts:
        """Copy the root's tensor to the tensors of all ranks."""
        start = partial(ops.broadcast_async_, root_rank=self._ranks[root])
        return self._in_place(opcode.BROADCAST, tensor, waits, (Sum, 1.0, 1.0, self._ranks[root]), start)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor, waits: bool) -> Parts:
        """Write the tensors of all ranks, which are equally large, one after the other into the output."""
        count = self.size * source.numel()
        if output.numel() != count:
            raise UsageError(f"all_gather: the output has {output.numel()} elements, and must have {count}")
        return self._into(output, (count,), opcode.ALLGATHER, source.reshape(-1), waits, ())

    def all_gather_list(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, waits: bool) -> Parts:
        """Write the tensor of each rank into the output at its place; sizes may differ."""
        whole = source.new_empty(sum(output.numel() for output in outputs))
        parts = self._into(whole, tuple(whole.shape), opcode.ALLGATHER, source.reshape(-1), waits, ())
        return self._then(parts, lambda: spread(whole, outputs))

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        waits: bool,
    ) -> Parts:
        """Send rows (along the first dimension) to each rank: as many as its split, or equally many."""
        size, rows = self.size, source.shape[0] if source.dim() else 1
        if not input_splits and rows % size:
            raise UsageError(f"all_to_all: {rows} rows cannot be divided among {size} ranks; give input_split_sizes")
        splits = list(input_splits) if input_splits else [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise UsageError(f"all_to_all: input splits {splits} do not divide {rows} rows among {size} ranks")
        received = sum(output_splits) if output_splits else output.shape[0] if output.dim() else 1
        columns = source.numel() // rows if rows else output.numel() // max(received, 1)
        shape = (received, columns)
        options = (Sum, 1.0, 1.0, 0, splits)
        return self._into(output, shape, opcode.ALLTOALL, source.reshape(rows, columns), waits, options)

    def all_to_all_list(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], waits: bool) -> Parts:
        """Send one tensor to each rank; sizes may differ."""
        given = torch.cat([source.reshape(-1) for source in sources])
        taken = given.new_empty(sum(output.numel() for output in outputs))
        by, to = ([tensor.numel() for tensor in tensors] for tensors in (outputs, sources))
        return self._then(self.all_to_all(taken, given, by, to, waits), lambda: spread(taken, outputs))

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int, waits: bool) -> Parts:
        """Write the tensors of all ranks into the root's outputs."""
        given = source.reshape(-1)
        taken = given.new_empty(sum(output.numel() for output in outputs))
        to = [given.numel() if rank == root else 0 for rank in range(self.size)]
        by = [output.numel() for output in outputs] if self.rank == root else [0] * self.size
        return self._then(self.all_to_all(taken, given, by, to, waits), lambda: spread(taken, outputs))

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int, waits: bool) -> Parts:
        """Write the root's tensor for each rank into that rank's output."""
        given = torch.cat([source.reshape(-1) for source in sources]) if sources else output.new_empty(0)
        counts = [source.numel() for source in sources] or [0] * self.size
        taken = given.new_empty(output.numel())
        by = [output.numel() if rank == root else 0 for rank in range(self.size)]
        parts = self.all_to_all(taken, given, by, counts, waits)
        return self._then(parts, lambda: output.copy_(taken.view_as(output)))

    def barrier(self, waits: bool) -> Parts:
        """Wait until all ranks are here."""
        begun = self._context.repeat(opcode.BARRIER, waits, None, None, None, self._set.process_set_id)
        if begun is None:
            with use(self._context):
                barrier(self._set)
            return []
        return [] if waits else [Part(begun[0].done, begun[0].wait)]

    # ---- between two ranks -----------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Parts:
        """Send a tensor to a rank of the set."""
        with use(self._context):
            handle = send_async(tensor.detach(), self._ranks[to], tag, self._set)
        return [Part(partial(self._is_done, handle), partial(self._synchronize, handle))]

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> tuple[Parts, Callable[[], int]]:
        """Receive into a tensor, from a rank of the set or from any. Also return a function that gives the sender."""
        senders: list[int] = []

        def wait() -> None:
            senders.append(self._ranks.index(self._synchronize(handle)))

        with use(self._context):
            place = None if source is None else self._ranks[source]
            handle = recv_async(tensor.detach(), place, tag, self._set)
        return [Part(partial(self._is_done, handle), wait)], lambda: senders[0]

    def _synchronize(self, handle: int) -> Any:
        with use(self._context):
            return synchronize(handle)

    # ---- how -------------------------------------------------------------------------------------------------------

    def _in_place(
        self, code: int, tensor: torch.Tensor, waits: bool, options: tuple[Any, ...], start: Callable[..., int]
    ) -> Parts:
        """Do an operation whose result replaces its input."""
        plain = tensor.detach()
        begun = self._context.repeat(code, waits, plain, plain, None, self._set.process_set_id, *options)
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
    ) -> Parts:
        """Do an operation whose result, of this shape, goes into another tensor."""
        if output.dtype != source.dtype:
            raise UsageError(f"the input is {source.dtype}, and the output {output.dtype}; both must be the same")
        plain = source.detach().contiguous()
        place = output.detach().view(shape) if output.is_contiguous() else output.new_empty(shape)
        begun = self._context.repeat(code, waits, plain, place, None, self._set.process_set_id, *options)
        if begun is None:
            with use(self._context):
                handle = _START[code](plain, process_set=self._set, **_named(code, options))
            parts: Parts = [Part(partial(self._is_done, handle), partial(self._put, handle, place))]
            parts = self._waited(parts, waits)
        elif waits:
            parts = []
            if type(begun) is Handle:  # the core has allocated the result
                fill_from(begun, place)
        else:
            handle = begun[0]
            parts = [Part(handle.done, handle.wait, lambda: fill_from(handle, place))]
        if output.is_contiguous():
            return parts
        return self._then(parts, lambda: output.copy_(place.view_as(output)))

    def _put(self, handle: int, place: torch.Tensor) -> None:
        result = self._synchronize(handle)
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
        """Return parts that also call `finish` once they are over; call it now if they are."""
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
