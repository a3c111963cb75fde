"""Operations of a group, with the names and arguments by which torch.distributed calls them.

`Operations` is the base of both classes that torch knows: `SordinoProcessGroup` (group.py) and `SordinoBackend`
(backend.py). Each method passes its tensors to `Collectives` and returns a `Work`. A collective has ended when its
method returns, unless the caller asks for an asynchronous one.

torch 2.13 has renamed some operations. Both names are defined, because callers of any version may use either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed
from torch._C import _distributed_c10d

from sordino.distributed import monitored
from sordino.distributed.collectives import Collectives
from sordino.distributed.place import Place
from sordino.distributed.shared_memory import MemoryPool, SharedStorages
from sordino.distributed.submissions import Parts
from sordino.distributed.untraced import untraced
from sordino.distributed.work import Completer, SordinoWork, torch_error
from sordino.errors import SordinoError
from sordino.runtime.context import current_or_none
from sordino.torch import lifecycle

dist: Any = torch.distributed  # its annotations lack much of what a backend uses
c10d: Any = _distributed_c10d

NAME = "sordino"
Tensors = Sequence[torch.Tensor]
Result = tuple[Parts, Tensors]


def _operation(options: Any = None) -> Callable[[Callable[..., Result]], Callable[..., SordinoWork]]:
    """Return a decorator that makes a method return a `Work` and raise torch's errors, as torch expects.

    Args:
        options: type of the last argument, which the caller may leave out. None: the method sends a message. All
            arguments are required, and its future waits for no collective.
    """

    def decorate(method: Callable[..., Result]) -> Callable[..., SordinoWork]:
        count = method.__code__.co_argcount - 1

        @untraced
        @wraps(method)
        def call(self: Operations, *arguments: Any, **named: Any) -> SordinoWork:
            given = (*arguments, *named.values())  # by name, torch passes only the last, `opts`
            if len(given) < count and options is not None:
                given = (*given, options())
            try:
                parts, results = method(self, *given)
            except SordinoError as error:
                raise torch_error(error) from error
            return SordinoWork(parts, results, completer=None if options is None else self._completer)

        return call

    return decorate


def _waits(options: Any) -> bool:
    """Return whether an operation must end before its call returns. torch before 2.7 waits itself."""
    return not getattr(options, "asyncOp", True)


class Operations:
    """A group of ranks and its operations. Ranks, roots and peers are numbers within the group."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._do = Collectives(place.context, place.process_set)
        self.memory = MemoryPool(place.context)
        self._completer = Completer()
        self._monitored = 0  # number of monitored barriers

    # ---- the group -------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def name(self) -> str:
        return NAME

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False

    @untraced
    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether collectives on a device are faster with memory of `allocate_tensor`.

        FSDP2 calls this after `set_allocate_memory_from_process_group_for_comm(True)`.
        """
        return torch.device(device).type == "cpu" and self._do.size > 1 and self._place.context.world.shares_memory

    @untraced
    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Return a 1-d CPU tensor of `size` elements with undefined values.

        From 32 KiB on, it is in memory that the ranks of this node share. Freed memory is reused.

        Raises:
            ValueError: the device is not the CPU, the size is negative, the group is destroyed, or this process is a
                forked child.
            DistBackendError: the machine has no shared memory left.
        """
        if torch.device(device).type != "cpu" or size < 0:
            raise ValueError(f"allocate_tensor({size}, device={device}): needs a size >= 0, and the CPU")
        try:
            return self.memory.allocate(size, dtype)
        except SordinoError as error:
            raise torch_error(error) from error

    def shared_storages(self) -> SharedStorages | None:
        """Return an object that moves storages to shared memory; None if ranks share no memory."""
        return SharedStorages(self._place.context) if self.supports_tensor_alloc("cpu") else None

    @untraced
    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of this rank's operations from now on. Raises ValueError if it is not above 0."""
        identity = self._place.process_set.process_set_id
        try:
            self._place.context.world.set_timeout(identity or 0, timeout.total_seconds())
        except SordinoError as error:
            raise torch_error(error) from error

    @untraced
    def shutdown(self) -> None:
        """Release shared memory. If the world was made for this group, leave it."""
        self.memory.close()
        if not self._place.owns:
            return
        self._place.owns = False
        if current_or_none() is self._place.context:
            lifecycle.shutdown()
        else:
            self._place.context.shutdown()

    @untraced
    def abort(self) -> None:
        """End the world of this group. Operations in flight raise DistBackendError on all its ranks."""
        self._place.context.abort("torch.distributed has aborted the process group")
        self.shutdown()

    @untraced
    def _pass_monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        store = dist.PrefixStore(f"sordino/monitored/{self._place.name}/{self._monitored}", self._place.store)
        self._monitored += 1
        monitored.barrier(store, self._do.rank, self._do.size, timeout, wait_all_ranks)

    # ---- reductions ------------------------------------------------------------------------------------------------

    @_operation(c10d.AllreduceOptions)
    def allreduce(self, tensors: Tensors, options: Any) -> Result:
        waits = _waits(options)
        if len(tensors) == 1:
            return self._do.all_reduce(tensors[0], options.reduceOp, waits), tensors
        return self._do.all_reduce_together(tensors, options.reduceOp, waits), tensors

    @_operation(c10d.AllreduceCoalescedOptions)
    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> Result:
        return self._do.all_reduce_together(tensors, options.reduceOp, _waits(options)), tensors

    allreduce_sparse = allreduce

    @_operation(c10d.ReduceOptions)
    def reduce(self, tensors: Tensors, options: Any) -> Result:
        parts = self._do.reduce(tensors[0], options.rootRank, options.reduceOp, _waits(options))
        return parts, tensors

    @_operation(c10d.ReduceScatterOptions)
    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> Result:
        return self._do.reduce_scatter(output, source, options.reduceOp, _waits(options)), [output]

    _reduce_scatter_base = reduce_scatter_single

    @_operation(c10d.ReduceScatterOptions)
    def reduce_scatter(self, outputs: Tensors, sources: Sequence[Tensors], options: Any) -> Result:
        return self._do.reduce_scatter_list(outputs[0], sources[0], options.reduceOp, _waits(options)), outputs

    @_operation(c10d.ReduceScatterOptions)
    def reduce_scatter_single_coalesced(self, outputs: Tensors, sources: Tensors, options: Any) -> Result:
        parts = []
        for output, source in zip(outputs, sources):
            parts += self._do.reduce_scatter(output, source, options.reduceOp, _waits(options))
        return parts, outputs

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- without arithmetic ----------------------------------------------------------------------------------------

    @_operation(c10d.BroadcastOptions)
    def broadcast(self, tensors: Tensors, options: Any) -> Result:
        return self._do.broadcast(tensors[0], options.rootRank, _waits(options)), tensors

    @_operation(c10d.AllgatherOptions)
    def allgather(self, outputs: Sequence[Tensors], sources: Tensors, options: Any) -> Result:
        return self._do.all_gather_list(outputs[0], sources[0], _waits(options)), outputs[0]

    @_operation(c10d.AllgatherOptions)
    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, options: Any) -> Result:
        return self._do.all_gather(output, source, _waits(options)), [output]

    _allgather_base = all_gather_single

    @_operation(c10d.AllgatherOptions)
    def all_gather_single_coalesced(self, outputs: Tensors, sources: Tensors, options: Any) -> Result:
        parts = []
        for output, source in zip(outputs, sources):
            parts += self._do.all_gather(output, source, _waits(options))
        return parts, outputs

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_operation(c10d.AllgatherOptions)
    def allgather_coalesced(self, outputs: Sequence[Tensors], sources: Tensors, options: Any) -> Result:
        parts = []
        for index, source in enumerate(sources):  # outputs[r] receives the tensors of rank r
            parts += self._do.all_gather_list([tensors[index] for tensors in outputs], source, _waits(options))
        return parts, [tensor for tensors in outputs for tensor in tensors]

    @_operation(c10d.AllToAllOptions)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        options: Any,
    ) -> Result:
        return self._do.all_to_all(output, source, output_splits, input_splits, _waits(options)), [output]

    alltoall_base = all_to_all_single

    @_operation(c10d.AllToAllOptions)
    def alltoall(self, outputs: Tensors, sources: Tensors, options: Any) -> Result:
        return self._do.all_to_all_list(outputs, sources, _waits(options)), outputs

    @_operation(c10d.GatherOptions)
    def gather(self, outputs: Sequence[Tensors], sources: Tensors, options: Any) -> Result:
        whole = outputs[0] if outputs else []
        return self._do.gather(whole, sources[0], options.rootRank, _waits(options)), whole

    @_operation(c10d.ScatterOptions)
    def scatter(self, outputs: Tensors, sources: Sequence[Tensors], options: Any) -> Result:
        given = sources[0] if sources else []
        return self._do.scatter(outputs[0], given, options.rootRank, _waits(options)), outputs

    @untraced
    def barrier(self, opts: Any = None) -> SordinoWork:
        """Start a barrier, and wait for it if the caller waits. The time limit is `opts.timeout`, if above 0."""
        options = c10d.BarrierOptions() if opts is None else opts
        waits, limit = _waits(options), options.timeout
        limit = limit if limit > timedelta(0) else None
        try:
            parts = self._do.barrier(waits and limit is None)
            work = SordinoWork(parts, timeout=limit, completer=self._completer)
        except SordinoError as error:
            raise torch_error(error) from error
        if waits:
            work.wait()
        return work

    # ---- between two ranks -----------------------------------------------------------------------------------------

    @_operation()
    def send(self, tensors: Tensors, to: int, tag: int) -> Result:
        return self._do.send(tensors[0], to, tag), tensors

    @untraced
    def recv(self, tensors: Tensors, source: int | None, tag: int) -> SordinoWork:
        try:
            parts, sender = self._do.receive(tensors[0], source, tag)
        except SordinoError as error:
            raise torch_error(error) from error
        return SordinoWork(parts, tensors, sender)

    @untraced
    def recv_anysource(self, tensors: Tensors, tag: int) -> SordinoWork:
        return self.recv(tensors, None, tag)
