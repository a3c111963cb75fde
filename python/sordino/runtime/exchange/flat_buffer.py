"""Flat buffers: parameters in an arena that the ranks of a node share, divided into segments that algorithms exchange.

A parameter becomes a view of the arena once (strides kept), so flattening costs nothing afterwards. A replacement by
the user (`parameter.data = ...`) is copied into the arena before the next exchange. A local shard of a DTensor stays
where it is: its values are copied to the arena before each exchange, and back after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sordino._core import Arena, Layout
from sordino.errors import UsageError
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST, common_device, core_device, gpu_tensor
from sordino.runtime.dtypes import DTYPES
from sordino.runtime.exchange.segments import segment_numbers
from sordino.runtime.local_shards import LocalShard
from sordino.runtime.tensors import check, dense_strides, dtype_code, label


@torch.no_grad()
def move(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Move a tensor to its view of the arena. Raises UsageError if its shape, dtype or device has changed."""
    require_unchanged(tensor, view)
    view.copy_(tensor)
    tensor.data = view


def require_unchanged(tensor: torch.Tensor, view: torch.Tensor) -> None:
    """Raise UsageError if the shape, dtype or device of a tensor differs from those of its view of the arena."""
    if tensor.shape != view.shape or tensor.dtype != view.dtype or tensor.device != view.device:
        before, now = (f"{one.dtype} {tuple(one.shape)} on {one.device}" for one in (view, tensor))
        raise UsageError(
            f"a parameter has changed from {before} to {now} since the optimizer was wrapped. Make such changes, and "
            "move the model to its device, before you wrap the optimizer, or wrap it again"
        )


BUFFER = "buffer "
"""Prefix of the names of exchanged buffers of the model."""


class FlatBuffer:
    """An arena with a value for each element of a layout."""

    def __init__(self, context: Context, layout: Layout, device: torch.device = HOST) -> None:
        self._context = context
        self.layout = layout
        self.device = device
        self.core_device = core_device(device, context)
        """Device whose memory contains the arena; None: the host."""
        self.arena = Arena(context.world, layout, self.core_device)
        self._memory = self.arena.memory if layout.bytes else None
        self.runs: list[tuple[int, torch.Tensor]] = []
        """Runs of adjacent elements of one dtype in one segment: the segment, and the elements as a flat tensor."""
        for run in layout.segments:
            if run.bytes > 0:
                dtype = DTYPES[run.dtype]
                self.runs.append((run.group, self.flat(dtype, run.offset, run.bytes // dtype.itemsize)))

    def flat(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """Return `count` elements from a byte offset on, as a 1-d tensor."""
        if count == 0 or self._memory is None:
            return torch.empty(0, dtype=dtype, device=self.device)
        # Each tensor has its own storage, so that saving one tensor does not save the whole arena.
        if self.device.type == "cuda":
            place = self.address + offset
            return gpu_tensor(self._memory, place, count * dtype.itemsize, self.device).view(dtype)
        view = memoryview(self._memory)  # type: ignore[arg-type]
        return torch.frombuffer(view, dtype=dtype, count=count, offset=offset)

    def like(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """Return the elements from a byte offset on, with a dense tensor's dtype, shape and order in memory."""
        return self.flat(tensor.dtype, offset, tensor.numel()).as_strided(tensor.shape, dense_strides(tensor))

    @property
    def address(self) -> int:
        """Address of the arena; 0 if it is empty."""
        return self.arena.address(0) if self._memory is not None else 0

    @property
    def shared(self) -> bool:
        """Whether the arena is in memory that the ranks of this node may be able to map."""
        world = self._context.world
        return world.shares_memory and world.in_shared_memory(self.address, self.layout.bytes)

    @torch.no_grad()
    def copy_(self, other: FlatBuffer) -> None:
        """Copy the values of another buffer with the same layout."""
        for (_, mine), (_, theirs) in zip(self.runs, other.runs):
            mine.copy_(theirs)

    @torch.no_grad()
    def add_(self, other: FlatBuffer) -> None:
        """Add the values of another buffer with the same layout."""
        for (_, mine), (_, theirs) in zip(self.runs, other.runs):
            mine.add_(theirs)


class ParameterBuffer(FlatBuffer):
    """Tensors (parameters and buffers) as views of one arena, or copies of local shards in it.

    An exchange begins with `adopt`. If it changes the values of parameters, it ends with `give_back`.

    Attributes:
        tensors: the tensors, in the order of the arena.
        names: their labels. A label includes the memory order, unless that is row-major.
        plain_names: their names without the memory order; "" for weights.
        are_buffers: whether they are buffers of the model.

    Args:
        context: the context of this rank.
        names: names of `tensors`, the same on all ranks.
        tensors: floating-point tensors on one device, without internal overlap.
        segments: division into segments; see `segment_numbers`.
        weighted: whether each segment has a weight that is exchanged with it (`weights`, float64, initially 1).
        buffers: number of buffers of the model, which are the last of `tensors`. They are in the segments of their
            modules.
        others: names of parameters that are not exchanged, which patterns of `segments` may match as well.

    Raises:
        UsageError: a tensor cannot be exchanged.
        TransportError: no shared memory is left.
    """

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        segments: str | int | Sequence[str],
        weighted: bool = False,
        buffers: int = 0,
        others: Sequence[str] = (),
    ) -> None:
        for name, tensor in zip(names, tensors):
            if not tensor.is_floating_point():
                raise UsageError(f"'{name}' is of {tensor.dtype}; only floating-point tensors can be averaged")
            check(tensor)
        paths = [name.removeprefix(BUFFER) for name in names]
        numbers = segment_numbers(paths, [t.numel() * t.element_size() for t in tensors], segments, others)
        self.segment_count = max(numbers, default=-1) + 1
        device = common_device(tensors, "the tensors to be averaged")
        self.weights = [
            torch.ones(1, dtype=torch.float64, device=device) for _ in range(self.segment_count if weighted else 0)
        ]
        labels = [label(name, tensor) for name, tensor in zip(names, tensors)]
        labels += [f"weight of segment {number}" for number in range(len(self.weights))]
        tensors = [*tensors, *self.weights]
        numbers += range(len(self.weights))
        order = sorted(range(len(labels)), key=lambda i: (numbers[i], dtype_code(tensors[i]), i))
        self.names = [labels[i] for i in order]
        plain = [*names, *("" for _ in self.weights)]
        self.plain_names = [plain[i] for i in order]
        self.are_buffers = [len(names) - buffers <= i < len(names) for i in order]
        self.tensors = [tensors[i] for i in order]
        layout = Layout(
            [(name, dtype_code(tensor), tuple(tensor.shape)) for name, tensor in zip(self.names, self.tensors)],
            groups=[numbers[i] for i in order],
        )
        super().__init__(context, layout, device)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors that move to the arena, and their views
        self._copies: list[tuple[LocalShard, torch.Tensor]] = []  # local shards, and their copies in the arena
        for tensor, offset in zip(self.tensors, self.layout.offsets):
            view = self.like(tensor, offset)
            if isinstance(tensor, LocalShard):
                self._copies.append((tensor, view))
            else:
                self._views.append((tensor, view))
        self.adopt()

    def adopt(self) -> None:
        """Copy local shards to the arena, and move tensors whose memory was replaced back to it.

        Raises:
            UsageError: a tensor has another shape, dtype or device than before.
        """
        for tensor, view in self._views:
            if tensor.data_ptr() != view.data_ptr():
                move(tensor, view)
        for shard, copy in self._copies:
            local = shard.local
            require_unchanged(local, copy)
            copy.copy_(local)

    @contextmanager
    def restoring(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Restore the present values of tensors in the arena after the block, in which the model uses the arena."""
        self.adopt()
        before = [tensor.detach().clone() for tensor in tensors]
        try:
            yield
        finally:
            self.adopt()
            with torch.no_grad():
                for tensor, value in zip(tensors, before):
                    tensor.copy_(value)

    @torch.no_grad()
    def give_back(self) -> None:
        """Copy the values in the arena to the local shards."""
        for shard, copy in self._copies:
            shard.local.copy_(copy)


class Mirror:
    """Arena for work that only the host can do: the arena itself, or a host copy of an arena on a GPU."""

    def __init__(self, context: Context, arena: FlatBuffer) -> None:
        self._arena = arena
        self._host = arena if arena.core_device is None else FlatBuffer(context, arena.layout)

    @property
    def address(self) -> int:
        """Address of the host's memory."""
        return self._host.address

    def take(self) -> None:
        """Copy the arena's values to the host, and wait for the GPU."""
        if self._host is not self._arena:
            self._host.copy_(self._arena)

    def give(self) -> None:
        """Copy the host's values to the arena."""
        if self._host is not self._arena:
            self._arena.copy_(self._host)
