"""The operations of torch.distributed in terms of this library's own, for one process set.

Each operation takes its tensors as torch.distributed passes them, and returns the parts that are still in flight
(`Part`): none if the caller waits, or if the operation ends at once.

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

from sordino.distributed.reductions import Kind, combined, kind_of, mean_of_total, require_reducible
from sordino.distributed.results import Rows, spread
from sordino.distributed.submissions import Parts, Submissions
from sordino.distributed.work import Part
from sordino.errors import UsageError
from sordino.runtime import opcode
from sordino.runtime.collectives import ops
from sordino.runtime.collectives.joining import barrier
from sordino.runtime.collectives.operation import Average, Sum, synchronize_all
from sordino.runtime.collectives.point_to_point import recv_async, send_async
from sordino.runtime.context import use
from sordino.runtime.views import movable


def _columns(source: torch.Tensor, output: torch.Tensor) -> int:
    """Return the number of elements in a row. A rank that sends no rows may have an input of one dimension."""
    for tensor in (source, output):
        if tensor.numel() or tensor.dim() > 1:
            return tensor.shape[1:].numel()
    return 1


class Collectives(Submissions):
    """The operations of a process set. Roots are numbers within the set."""

    # ---- with arithmetic -------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any, waits: bool) -> Parts:
        """Reduce a tensor in place."""
        kind, factor = kind_of(op)
        if tensor.is_sparse:
            return self._all_reduce_sparse(tensor, kind, factor, waits)
        if kind.combine is not None:
            return self._all_reduce_bits(tensor, kind.combine, waits)
        require_reducible(kind, tensor)
        return self._in_place(opcode.ALLREDUCE, tensor, waits, (kind.code, factor), ops.allreduce_async_)

    def _all_reduce_bits(self, tensor: torch.Tensor, combine: Callable[..., torch.Tensor], waits: bool) -> Parts:
        gathered = tensor.new_empty((self.size, tensor.numel()))
        return self._then(
            self.all_gather(gathered, tensor, waits),
            lambda: tensor.detach().copy_(combined(combine, gathered).view_as(tensor)),
        )

    def _all_reduce_sparse(self, tensor: torch.Tensor, kind: Kind, factor: float, waits: bool) -> Parts:
        """Reduce a sparse COO tensor in place. Ranks may have different numbers of entries."""
        if kind.code not in (Sum, Average):
            raise UsageError(f"all_reduce of a sparse tensor: the reduction must be SUM or AVG, not {kind.name}")
        given = tensor.detach().coalesce()
        with use(self._context):
            handles = [
                ops.allgather_async(entries, process_set=self._set)
                for entries in (given.indices().t().contiguous(), given.values())
            ]

        def wait() -> None:
            with use(self._context):
                indices, values = synchronize_all(handles)
            if factor != 1:
                values = (values * factor).to(tensor.dtype)
            total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()
            if kind.code == Average:
                mean_of_total(total.values(), self.size)
            with torch.no_grad():
                tensor.copy_(total)

        return self._waited([Part(lambda: all(map(self._is_done, handles)), wait)], waits)

    def all_reduce_together(self, tensors: Sequence[torch.Tensor], op: Any, waits: bool) -> Parts:
        """Reduce several tensors in place, as one operation where the reduction allows it."""
        kind, factor = kind_of(op)
        if len(tensors) == 1 or kind.combine is not None or any(tensor.is_sparse for tensor in tensors):
            return [part for tensor in tensors for part in self.all_reduce(tensor, op, waits)]
        for tensor in tensors:
            require_reducible(kind, tensor)
        with use(self._context):
            handle = ops.grouped_allreduce_async_(
                [movable(tensor.detach()) for tensor in tensors],
                op=kind.code,
                prescale_factor=factor,
                process_set=self._set,
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
        if (combine := kind.combine) is not None:
            received = torch.empty_like(rows)
            moved = self.all_to_all(received, rows, None, None, waits)
            return self._then(moved, lambda: output.detach().copy_(combined(combine, received).view_as(output)))
        require_reducible(kind, source)
        return self._into(output, (1, output.numel()), opcode.REDUCESCATTER, rows, waits, (kind.code, factor))

    def reduce_scatter_list(self, output: torch.Tensor, sources: Sequence[torch.Tensor], op: Any, waits: bool) -> Parts:
        """Reduce lists of tensors, one for each rank and of the output's size; each rank gets its own."""
        for rank, count in enumerate(self._counts("reduce_scatter", sources, "inputs")):
            if count != output.numel():
                raise UsageError(
                    f"reduce_scatter: the input for rank {rank} has {count} elements; the output has "
                    f"{output.numel()}. Both must have the same number"
                )
        return self.reduce_scatter(output, torch.cat([source.reshape(-1) for source in sources]), op, waits)

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
        each = [source.numel()] * self.size
        return self._into(output, (count,), opcode.ALLGATHER, source.reshape(-1), waits, (), Rows("all_gather", each))

    def all_gather_list(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, waits: bool) -> Parts:
        """Write the tensor of each rank into the output at its place; sizes may differ."""
        each = self._counts("all_gather", outputs)
        if each[self.rank] != source.numel():
            raise UsageError(
                f"all_gather: the input has {source.numel()} elements; the output for this rank, {self.rank}, has "
                f"{each[self.rank]}"
            )
        whole = source.new_empty(sum(each))
        rows = Rows("all_gather", each)
        parts = self._into(whole, tuple(whole.shape), opcode.ALLGATHER, source.reshape(-1), waits, (), rows)
        return self._then(parts, lambda: spread(whole, outputs))

    def all_to_all(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        waits: bool,
    ) -> Parts:
        """Send rows (along the first dimension) to each rank: the number in its split, or equal numbers."""
        size, rows = self.size, source.shape[0] if source.dim() else 1
        if not input_splits and rows % size:
            raise UsageError(f"all_to_all: {rows} rows cannot be divided among {size} ranks; give input_split_sizes")
        splits = list(input_splits) if input_splits else [rows // size] * size
        if sum(splits) != rows or len(splits) != size:
            raise UsageError(f"all_to_all: input splits {splits} do not divide {rows} rows among {size} ranks")
        received = output.shape[0] if output.dim() else 1
        if not output_splits and received % size:
            raise UsageError(
                f"all_to_all: {received} rows of the output cannot be divided among {size} ranks; give "
                "output_split_sizes"
            )
        expected = list(output_splits) if output_splits else [received // size] * size
        if sum(expected) != received or len(expected) != size:
            raise UsageError(
                f"all_to_all: output splits {expected} do not divide the output's {received} rows among {size} ranks"
            )
        given = source.reshape(rows, _columns(source, output))
        return self._exchange(output, given, splits, Rows("all_to_all", expected, "rows"), waits)

    def _exchange(
        self, output: torch.Tensor, source: torch.Tensor, splits: list[int], rows: Rows, waits: bool
    ) -> Parts:
        shape = (sum(rows.expected), source.shape[1])
        return self._into(output, shape, opcode.ALLTOALL, source, waits, (Sum, 1.0, 1.0, 0, splits), rows)

    def all_to_all_list(self, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], waits: bool) -> Parts:
        """Send one tensor to each rank; sizes may differ."""
        given = torch.cat([source.reshape(-1) for source in sources])
        by, to = self._counts("all_to_all", outputs), self._counts("all_to_all", sources, "inputs")
        taken = given.new_empty(sum(by))
        moved = self._exchange(taken, given.view(-1, 1), to, Rows("all_to_all", by), waits)
        return self._then(moved, lambda: spread(taken, outputs))

    def gather(self, outputs: Sequence[torch.Tensor], source: torch.Tensor, root: int, waits: bool) -> Parts:
        """Write the tensors of all ranks into the root's outputs."""
        given = source.reshape(-1, 1)
        to = [given.numel() if rank == root else 0 for rank in range(self.size)]
        by = self._counts("gather", outputs) if self.rank == root else [0] * self.size
        taken = given.new_empty(sum(by))
        moved = self._exchange(taken, given, to, Rows("gather", by), waits)
        return self._then(moved, lambda: spread(taken, outputs))

    def scatter(self, output: torch.Tensor, sources: Sequence[torch.Tensor], root: int, waits: bool) -> Parts:
        """Write the root's tensor for each rank into that rank's output."""
        given = torch.cat([source.reshape(-1) for source in sources]) if sources else output.new_empty(0)
        to = self._counts("scatter", sources, "inputs") if self.rank == root else [0] * self.size
        taken = given.new_empty(output.numel())
        by = [output.numel() if rank == root else 0 for rank in range(self.size)]
        parts = self._exchange(taken, given.view(-1, 1), to, Rows("scatter", by), waits)
        return self._then(parts, lambda: output.detach().copy_(taken.view_as(output)))

    def _counts(self, label: str, tensors: Sequence[torch.Tensor], what: str = "outputs") -> list[int]:
        """Return the number of elements of a list's tensors, of which there must be one for each rank."""
        if len(tensors) != self.size:
            raise UsageError(
                f"{label}: there are {len(tensors)} {what}; there must be one for each of {self.size} ranks"
            )
        return [tensor.numel() for tensor in tensors]

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
        started = self._context.message(True, False, tensor, self._ranks[to], tag, self._set.process_set_id)
        if started is not None:
            return [Part(started.done, started.wait)]
        with use(self._context):
            handle = send_async(movable(tensor.detach()), self._ranks[to], tag, self._set)
        return [Part(partial(self._is_done, handle), partial(self._synchronize, handle))]

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> tuple[Parts, Callable[[], int]]:
        """Receive into a tensor, from a rank of the set or any one. Also return a function that returns the sender."""
        place = None if source is None else self._ranks[source]
        started = self._context.message(False, False, tensor, place, tag, self._set.process_set_id)
        if started is not None:
            return [Part(started.done, started.wait)], lambda: self._ranks.index(started.source)
        senders: list[int] = []

        def wait() -> None:
            senders.append(self._ranks.index(self._synchronize(handle)))

        with use(self._context):
            handle = recv_async(movable(tensor.detach()), place, tag, self._set)
        return [Part(partial(self._is_done, handle), wait)], lambda: senders[0]
