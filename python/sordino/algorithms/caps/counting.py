"""Base class of detectors for parameter skipping, the kernels that count, and a copy of parameters to compare with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from sordino._core import Device, kernels
from sordino.algorithms import CaPS
from sordino.algorithms.caps.items import Items, Part
from sordino.errors import UsageError
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.flat_buffer import ParameterBuffer


class Detector(ABC):
    """Base class of detectors, which count the unchanged elements of the items of an arena.

    Attributes:
        counts: number of unchanged elements that `count` found, int64 [items].
        compared: number of elements of each item that `count` compared, int64 [items].
    """

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS, ratio: float = 1.0) -> None:
        self._arena = arena
        rows = zip(items.offsets.tolist(), items.elements.tolist(), items.dtypes.tolist())
        self._kernels = _Kernels(kernels.Items(list(rows), ratio), arena.core_device)
        self._digits = -1 if algorithm.digits is None else algorithm.digits
        self._seed = algorithm.seed
        self._all = torch.from_numpy(items.elements)
        self.counts = torch.zeros(len(items), dtype=torch.int64, device=HOST)
        self.compared = self._all
        self._found = self.counts.to(arena.device)  # the counts on the device of the kernels

    @abstractmethod
    def begin(self, step: int) -> None:
        """Store the present parameters, from before step `step`, and forget those stored earlier."""

    @abstractmethod
    def count(self, step: int) -> None:
        """Count the elements that step `step` has left unchanged."""

    @abstractmethod
    def keep(self, step: int, sent: Sequence[Part]) -> None:
        """Store the present parameters, from after step `step` and the exchange of the parts `sent`."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints, without the values that `begin` creates."""
        return {}

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise UsageError for a state of another kind of detector, or of other tensors."""
        if state:
            kind = "history" if "counters" in state else "movement"
            raise UsageError(f"this state was saved with detector='{kind}'; load it with that detector")

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.check_state(state)

    def standard_errors(self) -> torch.Tensor | None:
        """Return the standard errors of counts / compared as estimates for all elements, float64 [items].

        None if the detector's counts are not such estimates.
        """
        return None


class _Kernels:
    """Kernels for some items, on the CPU or on the device that holds the items. Methods as in `kernels.Items`."""

    def __init__(self, items: Any, device: Device | None) -> None:
        self.items = items
        self._device = device

    def unchanged(self, now: int, before: int, counts: torch.Tensor, digits: int, counters: int = 0) -> None:
        if self._device is None:
            self.items.unchanged(now, before, counts.data_ptr(), digits, counters)
        else:
            self._device.unchanged(self.items, now, before, counts.data_ptr(), digits, counters)

    def draw(self, key: int, indices: torch.Tensor) -> None:
        if self._device is None:
            self.items.draw(key, indices.data_ptr())
        else:
            self._device.draw(self.items, key, indices.data_ptr())

    def select(self, counters: torch.Tensor, indices: torch.Tensor) -> None:
        if self._device is None:
            self.items.select(counters.data_ptr(), indices.data_ptr())
        else:
            self._device.select(self.items, counters.data_ptr(), indices.data_ptr())

    def save_at(self, now: int, indices: torch.Tensor, saved: torch.Tensor) -> None:
        if self._device is None:
            self.items.save_at(now, indices.data_ptr(), saved.data_ptr())
        else:
            self._device.save_at(self.items, now, indices.data_ptr(), saved.data_ptr())

    def unchanged_at(
        self, now: int, saved: torch.Tensor, indices: torch.Tensor, counts: torch.Tensor, digits: int
    ) -> None:
        places = (now, saved.data_ptr(), indices.data_ptr(), counts.data_ptr(), digits)
        if self._device is None:
            self.items.unchanged_at(*places)
        else:
            self._device.unchanged_at(self.items, *places)


class Copy:
    """Copy of all parameters, as bytes at the same offsets as in the arena."""

    def __init__(self, arena: ParameterBuffer) -> None:
        self._now = arena.flat(torch.uint8, 0, arena.layout.bytes)
        self._before = torch.empty_like(self._now)

    @property
    def address(self) -> int:
        return self._before.data_ptr()

    def take(self, parts: Sequence[Part] | None = None) -> None:
        """Copy these parts; None: all."""
        if parts is None:
            self._before.copy_(self._now)
        for part in parts or ():
            inside = slice(part.offset, part.offset + part.bytes)
            self._before[inside].copy_(self._now[inside])

    def view(self, dtype: torch.dtype, offset: int, length: int) -> torch.Tensor:
        """Return `length` copied bytes from `offset` on, as a tensor of this dtype."""
        return self._before[offset : offset + length].view(dtype)
