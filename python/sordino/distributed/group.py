"""The process group "sordino" of torch.distributed, and its registration.

torch calls one process group for all devices if a backend's function returns a `ProcessGroup`. The group of all ranks
has the world of `sordino.torch.init()`, or makes it, so both can be used together. torch makes other groups on their
members alone, so each has a world of its own, whose ranks meet in the store that torch gives to the group.

Methods have the names of torch's `ProcessGroup`, before and after torch 2.13 renamed some. Operations whose caller does
not ask for an asynchronous one are over when they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from sordino.distributed.collectives import Collectives, Parts
from sordino.distributed.work import SordinoWork, torch_error
from sordino.errors import SordinoError, UsageError
from sordino.rendezvous.starts import find_start
from sordino.runtime.context import Context, current_or_none
from sordino.torch import lifecycle

NAME = "sordino"
Tensors = Sequence[torch.Tensor]


def register() -> None:
    """Make "sordino" known to torch.distributed."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> SordinoProcessGroup:
    """Return a group, for `init_process_group` and `new_group`. Collective over its members."""
    if dist.is_initialized():
        start = find_start(store=store, rank=rank, world_size=size)
        return SordinoProcessGroup(Context(start.world(None, False)), True)
    context = current_or_none()
    if context is None:
        lifecycle.init(store=store, rank=rank, world_size=size)
        context = current_or_none()
        assert context is not None
        return SordinoProcessGroup(context, True)
    if (context.rank, context.size) != (rank, size):
        raise UsageError(
            f"init_process_group: this is rank {rank} of {size}, but sordino.torch.init() has made it rank "
            f"{context.rank} of {context.size}; start both with the same ranks"
        )
    return SordinoProcessGroup(context, False)


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


class SordinoProcessGroup(dist.ProcessGroup):
    """A group of ranks of torch.distributed.

    Args:
        context: its ranks.
        owns: whether the world ends with the group.
    """

    def __init__(self, context: Context, owns: bool) -> None:
        super().__init__(context.rank, context.size)
        self._context, self._owns = context, owns
        self._do = Collectives(context)
        self._group_name = self._description = ""

    # ---- the group -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def name(self) -> str:
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    @property
    def supports_coalescing(self) -> bool:
        return False

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
