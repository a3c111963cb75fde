"""Calls on all of ResNet-50's tensors: our kernels, and the operations of PyTorch that they replace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gpu.place import Call, Place
from sordino._core import kernels
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES


class ResNet:
    """One set of ResNet-50's tensors: weights, gradients, velocities, and two flat buffers with equal values."""

    def __init__(self, place: Place, shapes: Sequence[tuple[int, ...]]) -> None:
        self.x, self.y, self.z = ([torch.randn(shape, device=place.device) for shape in shapes] for _ in range(3))
        self.lengths = [one.numel() for one in self.x]
        self.flat = torch.randn(sum(self.lengths), device=place.device)
        self.before = self.flat.clone()
        self.results = torch.full((4 * len(self.lengths),), 1e-3, dtype=torch.float64, device=place.device)
        self.spans = [(one.data_ptr(), 4 * one.numel()) for one in self.x]
        self.at = self.results.data_ptr()

        self.singles, self.pairs, self.triples, self.mean = map(
            self._rows, ([self.x], [self.x, self.y], [self.x, self.y, self.z], [self.x, self.y, self.x])
        )

    @staticmethod
    def _rows(lists: list[list[torch.Tensor]]) -> list[tuple[tuple[int, ...], int]]:
        return [(tuple(one.data_ptr() for one in row), row[0].numel()) for row in zip(*lists, strict=True)]


def _torch_mean(of: ResNet) -> None:
    torch._foreach_add_(of.x, of.y)
    torch._foreach_mul_(of.x, 0.5)


def _torch_axpby(of: ResNet) -> None:
    torch._foreach_mul_(of.y, 0.9)
    torch._foreach_add_(of.y, of.x, alpha=0.1)


def _torch_unflatten(of: ResNet) -> None:
    torch._foreach_copy_(of.x, _unflatten_dense_tensors(of.flat, of.x))


def _torch_unchanged(of: ResNet) -> object:
    parts = (torch.split(one, of.lengths) for one in (of.flat, of.before))
    counts = [torch.eq(now, then).sum() for now, then in zip(*parts, strict=True)]
    of.before.copy_(of.flat)
    return counts


def _torch_lars(of: ResNet) -> None:
    changes = torch._foreach_add(of.y, of.x, alpha=1e-4)
    torch._foreach_mul_(changes, 0.1)
    torch._foreach_mul_(of.z, 0.9)
    torch._foreach_add_(of.z, changes)
    torch._foreach_sub_(of.x, of.z)


THEIRS: dict[str, Callable[[ResNet], object]] = {
    "reduce 2->1": _torch_mean,
    "axpby": _torch_axpby,
    "flatten": lambda of: _flatten_dense_tensors(of.x),
    "unflatten": _torch_unflatten,
    "norm": lambda of: torch._foreach_norm(of.x, 2),
    "unchanged": _torch_unchanged,
    "lars": _torch_lars,
}
"""PyTorch's operations by the names of our kernels."""


def resnet_calls(place: Place, like: ResNet) -> dict[str, Call[ResNet]]:
    """Return calls of the kernels that this place has, on sets of tensors with the sizes of `like`."""
    cuda, code, stream = place.kernels(), DTYPE_CODES[torch.float32], place.stream
    starts = np.cumsum([0, *like.lengths[:-1]])
    items = kernels.Items([(4 * int(at), n, code) for at, n in zip(starts, like.lengths, strict=True)], 1.0)
    flat, before = (lambda of: of.flat.data_ptr()), (lambda of: of.before.data_ptr())
    calls: dict[str, Call[ResNet]] = {
        "reduce 2->1": (3, "reduce", lambda of: cuda.reduce(Sum, code, of.mean, 2, 1.0, 0.5, stream=stream)),
        "axpby": (3, "axpby", lambda of: cuda.axpby(code, of.pairs, 0.1, 0.9, stream=stream)),
        "flatten": (2, "flatten", lambda of: cuda.flatten(of.spans, flat(of), stream=stream)),
        "unflatten": (2, "unflatten", lambda of: cuda.unflatten(flat(of), of.spans, stream=stream)),
        "norm": (1, "norms", lambda of: cuda.norms(code, of.singles, of.at, stream=stream)),
        "unchanged": (2, "unchanged", lambda of: cuda.unchanged(items, flat(of), before(of), of.at, stream=stream)),
        "lars": (5, "lars_step", lambda of: cuda.lars_step(code, of.triples, of.at, 1e-4, 0.9, False, stream=stream)),
    }
    return {kernel: call for kernel, call in calls.items() if hasattr(cuda, call[1])}
