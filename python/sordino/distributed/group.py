"""The process group "sordino" of torch.distributed.

torch calls one process group for all devices if a backend's function returns a `ProcessGroup`. The group of all ranks
has the world of `sordino.torch.init()`, or makes it, so both can be used together. Another group is a process set of
that world, if all ranks make it together and torch says so (2.13 or newer). Otherwise only its members make it, as a
world of its own, whose ranks meet in the store that torch gives to the group. The process set lives as long as the
world, because torch destroys a group on its members alone.

Methods have the names of torch's `ProcessGroup`, before and after torch 2.13 renamed some. Operations whose caller does
not ask for an asynchronous one are over when they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed

from sordino.distributed.collectives import Collectives, Parts
from sordino.distributed.work import SordinoWork, torch_error
from sordino.errors import SordinoError, UsageError
from sordino.rendezvous.starts import find_start
from sordino.runtime.context import Context, current, current_or_none, use
from sordino.runtime.process_set import ProcessSet, global_process_set, new_set_id
from sordino.torch import lifecycle

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

NAME = "sordino"
Tensors = Sequence[torch.Tensor]


def make(store: Any, rank: int, size: int, timeout: timedelta) -> SordinoProcessGroup:
    """Return a group, for `init_process_group` and for groups of torch before 2.13. Collective over its members."""
    if dist.is_initialized():
        return SordinoProcessGroup(_world(store, rank, size), store, owns=True)
    context = current_or_none()
    if context is None:
        lifecycle.init(store=store, rank=rank, world_size=size)
        return SordinoProcessGroup(current(), store, owns=True)
    if (context.rank, context.size) != (rank, size):
        raise UsageError(
            f"init_process_group: this is rank {rank} of {size}, but sordino.torch.init() has made it rank "
            f"{context.rank} of {context.size}; start both with the same ranks"
        )
    return SordinoProcessGroup(context, store, owns=False)


def _world(store: Any, rank: int, size: int) -> Context:
    """Return a world of its own for some ranks, which meet in this store."""
    return Context(find_start(store=store, rank=rank, world_size=size).world(None, False))


def _operation(method: Callable[..., tuple[Parts, Tensors]]) -> Callable[..., SordinoWork]:
    """Return the method as torch calls it: it returns a `Work`, and raises torch's errors."""

    @wraps(method)
    def call(self: SordinoProcessGroup, *arguments: Any, **named: Any) -> SordinoWork:
        try:
            parts, results = method(self, *arguments, *named.values())  # torch names only the last one, `opts`
        except SordinoError as error:
            raise torch_error(error) from error
        return SordinoWork(parts, results)

    return call


def _waits(options: Any) -> bool:
    """Return whether the caller waits for an operation at once. torch before 2.7 does not say."""
    return not getattr(options, "asyncOp", True)


class SordinoProcessGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A group of ranks of torch.distributed.

    Args:
        context: the world of its ranks.
        store: torch's store for this group.
        process_set: its ranks.
        owns: whether the world ends with the group.
    """

    def __init__(
        self, context: Context, store: Any, process_set: ProcessSet = global_process_set, owns: bool = False
    ) -> None:
        self._do = Collectives(context, process_set)
        super().__init__(self._do.rank, self._do.size)
        self._context, self._store, self._owns = context, store, owns
        self._group_name = self._description = ""

    # ---- the group -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def supports_coalescing(self) -> bool:
        return False

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> SordinoProcessGroup | None:
        """Return a group of some ranks; None on others. torch 2.13 and newer call it, on the default group."""
        rank, members = self._do.rank, list(ranks)
        # torch's names: a number if all ranks make the group together, and otherwise a hash.
        together = group_name.isdecimal() and members == sorted(members)
        if together:
            with use(self._context):
                process_set = ProcessSet(members)
                process_set.process_set_id = new_set_id(members)
        if rank not in members:
            return None
        if together:
            made = SordinoProcessGroup(self._context, self._store, process_set)
        else:
            store = dist.PrefixStore(group_name, self._store)
            made = SordinoProcessGroup(_world(store, members.index(rank), len(members)), store, owns=True)
        made.setGroupName(group_name)
        made.setGroupDesc(group_desc or "")
        return made

    def shutdown(self) -> None:
        """Leave the world of this group, unless `sordino.torch.init()` has made it."""
        if not self._owns:
            return
        self._owns = False
        if current_or_none() is self._context:
            lifecycle.shutdown()
        else:
            self._context.shutdown()

    def abort(self) -> None:
        self._context.abort("torch.distributed has aborted the process group")

    # ---- reductions ------------------------------------------------------------------------------------------------

    @_operation
    def allreduce(self, tensors: Tensors, options: Any) -> tuple[Parts, Tensors]:
        waits = _waits(options)
        if len(tensors) == 1:
            return self._do.all_reduce(tensors[0], options.reduceOp, waits), tensors
        return self._do.all_reduce_together(tensors, options.reduceOp, waits), tensors

    allreduce_coalesced = allreduce

    @_operation
    def reduce(self, tensors: Tensors, options: Any) -> tuple[Parts, Tensors]:
        parts = self._do.reduce(tensors[0], options.rootRank, options.reduceOp, _waits(options))
        return parts, tensors

    @_operation
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> tuple[Parts, Tensors]:
        return self._do.reduce_scatter(output, source, options.reduceOp, _waits(options)), [output]

    _reduce_scatter_base = reduce_scatter_single

    @_operation
    def reduce_scatter(self, outputs: Tensors, sources: Sequence[Tensors], options: Any) -> tuple[Parts, Tensors]:
        whole = torch.cat([source.reshape(-1) for source in sources[0]])
        return self._do.reduce_scatter(outputs[0], whole, options.reduceOp, _waits(options)), outputs

    @_operation
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, sources: Tensors, options: Any
    ) -> tuple[Parts, Tensors]:
        parts = []
        for output, source in zip(outputs, sources):
            parts += self._do.reduce_scatter(output, source, options.reduceOp, _waits(options))
        return parts, outputs

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- without arithmetic ----------------------------------------------------------------------------------------

    @_operation
    def broadcast(self, tensors: Tensors, options: Any) -> tuple[Parts, Tensors]:
        return self._do.broadcast(tensors[0], options.rootRank, _waits(options)), tensors

    @_operation
    def allgather(self, outputs: Sequence[Tensors], sources: Tensors, options: Any) -> tuple[Parts, Tensors]:
        return self._do.all_gather_list(outputs[0], sources[0], _waits(options)), outputs[0]

    @_operation
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> tuple[Parts, Tensors]:
        return self._do.all_gather(output, source, _waits(options)), [output]

    _allgather_base = all_gather_single

    @_operation
    def all_gather_single_coalesced(self, outputs: Tensors, sources: Tensors, options: Any) -> tuple[Parts, Tensors]:
        parts = []
        for output, source in zip(outputs, sources):
            parts += self._do.all_gather(output, source, _waits(options))
        return parts, outputs

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_operation
    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        options: Any,
    ) -> tuple[Parts, Tensors]:
        return self._do.all_to_all(output, source, output_splits, input_splits, _waits(options)), [output]

    alltoall_base = all_to_all_single

    @_operation
    def alltoall(self, outputs: Tensors, sources: Tensors, options: Any) -> tuple[Parts, Tensors]:
        return self._do.all_to_all_list(outputs, sources, _waits(options)), outputs

    @_operation
    def gather(self, outputs: Sequence[Tensors], sources: Tensors, options: Any) -> tuple[Parts, Tensors]:
        whole = outputs[0] if outputs else []
        return self._do.gather(whole, sources[0], options.rootRank, _waits(options)), whole

    @_operation
    def scatter(self, outputs: Tensors, sources: Sequence[Tensors], options: Any) -> tuple[Parts, Tensors]:
        given = sources[0] if sources else []
        return self._do.scatter(outputs[0], given, options.rootRank, _waits(options)), outputs

    @_operation
    def barrier(self, options: Any) -> tuple[Parts, Tensors]:
        return self._do.barrier(_waits(options)), []

    # ---- between two ranks -----------------------------------------------------------------------------------------

    @_operation
    def send(self, tensors: Tensors, to: int, tag: int) -> tuple[Parts, Tensors]:
        return self._do.send(tensors[0], to, tag), tensors

    def recv(self, tensors: Tensors, source: int | None, tag: int) -> SordinoWork:
        try:
            parts, sender = self._do.receive(tensors[0], source, tag)
        except SordinoError as error:
            raise torch_error(error) from error
        return SordinoWork(parts, tensors, sender)

    def recv_anysource(self, tensors: Tensors, tag: int) -> SordinoWork:
        return self.recv(tensors, None, tag)
