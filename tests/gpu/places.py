"""Device memory for tests: tensors at chosen addresses between poison, and comparisons of results."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from checks.reference import FLOATS, values

DEVICE = "cuda"
GUARD, POISON = 64, 0xA5
SIZES = (0, 1, 2, 7, 15, 16, 17, 33, 1000, 4097, 70001)
PHASES = ("aligned", "alike", "different")
EDGES = (0.0, -0.0, math.inf, -math.inf, math.nan, 6e-8, 1e-40, 1e30, 65504.0, 5e-324)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes."""
    if tensor.numel() == 0:
        return torch.zeros(0, dtype=torch.uint8, device=tensor.device)
    return tensor.reshape(-1).view(torch.uint8)


class Place:
    """A copy of a tensor, `phase` bytes after a multiple of 64, in device memory."""

    def __init__(self, content: torch.Tensor, phase: int = 0) -> None:
        size, self.dtype = content.numel() * content.dtype.itemsize, content.dtype
        self._memory = torch.full((2 * GUARD + phase + size,), POISON, dtype=torch.uint8, device=DEVICE)
        self._begin, self._end = GUARD + phase, GUARD + phase + size
        self._memory[self._begin : self._end].copy_(raw(content))
        self.address, self.elements = self._memory.data_ptr() + self._begin, content.numel()

    def take(self) -> torch.Tensor:
        """Return the present content, on the host. The memory around it must not have changed."""
        everything = self._memory.cpu()
        around = torch.cat([everything[: self._begin], everything[self._end :]])
        assert bool((around == POISON).all()), "written beside the tensor"
        content = everything[self._begin : self._end].clone()
        return content.view(self.dtype) if self.elements else torch.zeros(0, dtype=self.dtype)


def phase(kind: str, index: int, dtype: torch.dtype) -> int:
    """Return the offset at which tensor number `index` of a row begins."""
    if kind == "aligned":
        return 0
    return (3 + (index if kind == "different" else 0)) * dtype.itemsize % 64


def content(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return random values of the whole range, for floats with some edge cases."""
    return _content(rank, count, dtype, seed).clone()


@lru_cache(maxsize=256)
def _content(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    found = values(rank, count, dtype, seed, wide=True).reshape(-1)
    if dtype in FLOATS and count > 20:
        found[5 : 5 + len(EDGES)] = torch.tensor(EDGES, dtype=torch.float64).to(dtype)
        found[-len(EDGES) + rank :] = torch.tensor(EDGES[rank:], dtype=torch.float64).to(dtype)
    return found


def assert_same(got: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    """Assert that the bits are the same; any NaN equals any other."""
    if got.dtype in FLOATS:
        assert torch.equal(got.isnan(), wanted.isnan()), what
        got, wanted = got[~got.isnan()], wanted[~wanted.isnan()]
    assert torch.equal(raw(got), raw(wanted)), what
