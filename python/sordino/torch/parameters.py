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
from sordino.torch.segments import dense_strides
from sordino.torch.tensors import check, dtype_code


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


class ParameterArena:
    """Some tensors (parameters, and buffers) as views of one arena.

    Args:
        names: of the tensors, the same on all ranks.
        tensors: floating-point, on the CPU, not overlapping in memory with themselves.
        segments: how they are cut; see `segment_numbers`.

    Raises:
        UsageError: tensors that cannot be exchanged. TransportError: no shared memory left.
    """

    def __init__(
        self,
        context: Context,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        segments: str | int | Sequence[str],
    ) -> None:
        for name, tensor in zip(names, tensors):
            check(tensor)
            if not tensor.is_floating_point():
                raise UsageError(f"'{name}' is of {tensor.dtype}; only floating-point tensors can be averaged")
        numbers = segment_numbers(names, [t.numel() * t.element_size() for t in tensors], segments)
        order = sorted(range(len(names)), key=lambda i: (numbers[i], dtype_code(tensors[i]), i))
        self._context = context
        self._tensors = [tensors[i] for i in order]
        self.layout = Layout(
            [(_label(names[i], tensors[i]), dtype_code(tensors[i]), tuple(tensors[i].shape)) for i in order],
            groups=[numbers[i] for i in order],
        )
        self.segment_count = max(numbers, default=-1) + 1
        self._arena = Arena(context.world, self.layout)
        self._views = self._make_views()
        self.adopt()

    @property
    def address(self) -> int:
        """Where the arena begins."""
        return self._arena.address(0) if self._tensors else 0

    @property
    def arena(self) -> Arena:
        """What owns the memory."""
        return self._arena

    @property
    def shared(self) -> bool:
        """Whether the ranks of this node can reach it."""
        world = self._context.world
        return world.shares_memory and world.in_shared_memory(self.address, self.layout.bytes)

    def _make_views(self) -> list[torch.Tensor]:
        memory = memoryview(self._arena.memory)  # type: ignore[arg-type]
        views = []
        for offset, tensor in zip(self.layout.offsets, self._tensors):
            if tensor.numel() == 0:
                views.append(torch.empty_like(tensor))
                continue
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            views.append(flat.as_strided(tensor.shape, dense_strides(tensor)))
        return views

    @torch.no_grad()
    def adopt(self) -> None:
        """Takes in tensors whose memory somebody has replaced.

        Raises:
            UsageError: by ones of another shape or dtype.
        """
        for tensor, view in zip(self._tensors, self._views):
            if tensor.data_ptr() == view.data_ptr():
                continue
            if tensor.shape != view.shape or tensor.dtype != view.dtype:
                raise UsageError(
                    f"a parameter of {view.dtype} {tuple(view.shape)} has become one of {tensor.dtype} "
                    f"{tuple(tensor.shape)}; wrap the optimizer anew after such a change"
                )
            view.copy_(tensor)
            tensor.data = view


def _label(name: str, tensor: torch.Tensor) -> str:
    """Memory order counts: values are averaged place by place."""
    return name if tensor.is_contiguous() else f"{name} with strides {dense_strides(tensor)}"
