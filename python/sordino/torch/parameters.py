"""Parameters in flat memory that the ranks of a node share, cut into the segments that algorithms exchange.

A parameter becomes a view of the arena once (strides kept), so flattening costs nothing afterwards. What a user puts in
its place (`parameter.data = ...`) is copied back in before the next exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from sordino._core import Arena, Layout
from sordino.context import Context
from sordino.errors import UsageError
from sordino.torch.tensors import DTYPES, check, dense_strides, dtype_code, label


def block_of(name: str) -> str:
    """The block that a parameter belongs to: the top-level module, or the member of a numbered container in it."""
    parts = name.split(".")
    if len(parts) == 1:
        return ""  # of the model itself
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdigit() else parts[0]


def segment_numbers(names: Sequence[str], sizes: Sequence[int], segments: str | int | Sequence[str]) -> list[int]:
    """The segment of each tensor, numbered from 0 in the order of first use.

    Args:
        names: of the tensors.
        sizes: their bytes.
        segments: as of `sordino.algorithms.Crossover`.

    Raises:
        UsageError: a pattern matches no name.
    """
    if segments == "model":
        return [0] * len(names)
    if isinstance(segments, int):
        numbers, used, number = [], 0, 0
        for size in sizes:
            if used > 0 and used + size > segments:
                used, number = 0, number + 1
            used += size
            numbers.append(number)
        return numbers
    keys: list[object]
    if isinstance(segments, str):
        keys = [block_of(name) for name in names]
    else:
        matches = [
            next((i for i, pattern in enumerate(segments) if fnmatchcase(name, pattern)), None) for name in names
        ]
        for pattern in segments:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"segments: the pattern {pattern!r} matches no parameter; they are {', '.join(names[:8])}…"
                )
        keys = list(matches)
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


@torch.no_grad()
def adopt(tensors: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> None:
    """Moves tensors to the views that are kept for them, unless they are there.

    Raises:
        UsageError: one has taken another shape or dtype.
    """
    for tensor, view in zip(tensors, views):
        if tensor.data_ptr() == view.data_ptr():
            continue
        if tensor.shape != view.shape or tensor.dtype != view.dtype:
            raise UsageError(
                f"a parameter of {view.dtype} {tuple(view.shape)} has become one of {tensor.dtype} "
                f"{tuple(tensor.shape)}; wrap the optimizer anew after such a change"
            )
        view.copy_(tensor)
        tensor.data = view


class FlatValues:
    """A value for each element of a layout, in an arena."""

    def __init__(self, context: Context, layout: Layout) -> None:
        self._context = context
        self.layout = layout
        self.arena = Arena(context.world, layout)
        self._memory = memoryview(self.arena.memory) if layout.bytes else None  # type: ignore[arg-type]
        self.runs: list[tuple[int, torch.Tensor]] = []
        """What lies side by side with one dtype in one segment: the segment, and its elements as a flat tensor."""
        for run in layout.segments:
            if run.bytes > 0:
                dtype = DTYPES[run.dtype]
                self.runs.append((run.group, self.flat(dtype, run.offset, run.bytes // dtype.itemsize)))

    def flat(self, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
        """The elements from a byte offset on, as a tensor of one dimension."""
        if count == 0 or self._memory is None:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset)

    def like(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """The elements from a byte offset on, with a dense tensor's dtype, shape and order in memory."""
        return self.flat(tensor.dtype, offset, tensor.numel()).as_strided(tensor.shape, dense_strides(tensor))

    @property
    def address(self) -> int:
        """Where the arena begins."""
        return self.arena.address(0) if self._memory is not None else 0

    @property
    def shared(self) -> bool:
        """Whether the ranks of this node can reach it."""
        world = self._context.world
        return world.shares_memory and world.in_shared_memory(self.address, self.layout.bytes)

    @torch.no_grad()
    def copy_(self, other: FlatValues) -> None:
        """Takes the values of another one of the same layout."""
        for (_, mine), (_, theirs) in zip(self.runs, other.runs):
            mine.copy_(theirs)

    @torch.no_grad()
    def add_(self, other: FlatValues) -> None:
        """Adds the values of another one of the same layout."""
        for (_, mine), (_, theirs) in zip(self.runs, other.runs):
            mine.add_(theirs)


class ParameterArena(FlatValues):
    """Some tensors (parameters, and buffers) as views of one arena.

    Attributes:
        names, tensors: in the order in which they lie there.

    Args:
        names: of the tensors, the same on all ranks.
        tensors: floating-point, on the CPU, not overlapping in memory with themselves.
        segments: how they are cut; see `segment_numbers`.
        weighted: whether each segment has a weight that travels with it: `weights`, float64, 1 to begin with.

    Raises:
        UsageError: tensors that cannot be exchanged. TransportError: no shared memory left.
    """

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        segments: str | int | Sequence[str],
        weighted: bool = False,
    ) -> None:
        for name, tensor in zip(names, tensors):
            check(tensor)
            if not tensor.is_floating_point():
                raise UsageError(f"'{name}' is of {tensor.dtype}; only floating-point tensors can be averaged")
        numbers = segment_numbers(names, [t.numel() * t.element_size() for t in tensors], segments)
        self.segment_count = max(numbers, default=-1) + 1
        self.weights = [torch.ones(1, dtype=torch.float64) for _ in range(self.segment_count if weighted else 0)]
        labels = [label(name, tensor) for name, tensor in zip(names, tensors)]
        labels += [f"weight of segment {number}" for number in range(len(self.weights))]
        tensors = [*tensors, *self.weights]
        numbers += range(len(self.weights))
        order = sorted(range(len(labels)), key=lambda i: (numbers[i], dtype_code(tensors[i]), i))
        self.names = [labels[i] for i in order]
        self.tensors = [tensors[i] for i in order]
        layout = Layout(
            [(name, dtype_code(tensor), tuple(tensor.shape)) for name, tensor in zip(self.names, self.tensors)],
            groups=[numbers[i] for i in order],
        )
        super().__init__(context, layout)
        self._views = [self.like(tensor, offset) for offset, tensor in zip(self.layout.offsets, self.tensors)]
        self.adopt()

    def adopt(self) -> None:
        """Takes in tensors whose memory somebody has replaced. UsageError if by ones of another shape or dtype."""
        adopt(self.tensors, self._views)
