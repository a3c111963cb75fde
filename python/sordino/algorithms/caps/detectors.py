"""Detectors of parameter skipping. They count, for each item, the elements that a step has left unchanged.

A detector stores the parameters (all, or a sample) after an exchange, and compares with them after the next step. One
kernel call counts or stores all items. Counters and averages are tensors, so that checkpoints can contain them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from sordino.algorithms import CaPS
from sordino.algorithms.caps.counting import Copy, Detector
from sordino.algorithms.caps.items import Items, Part
from sordino.errors import UsageError
from sordino.runtime.devices import HOST
from sordino.runtime.dtypes import DTYPES
from sordino.runtime.exchange.flat_buffer import ParameterBuffer

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio, to spread seeds that are close together


class NaiveDetector(Detector):
    """Detector that compares all elements. Its counts are exact."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        super().__init__(arena, items, algorithm)
        self._copy = Copy(arena)

    def begin(self, step: int) -> None:
        self._copy.take()

    def count(self, step: int) -> None:
        # The kernel also stores the values that it reads. So `keep` copies only the parts that the exchange changes.
        self._kernels.unchanged(self._arena.address, self._copy.address, self._found, self._digits)
        self.counts.copy_(self._found)

    def keep(self, step: int, sent: Sequence[Part]) -> None:
        self._copy.take(sent)


class _SamplingDetector(Detector):
    """Base class of detectors that compare and keep only some elements of each item."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        super().__init__(arena, items, algorithm, algorithm.sample_ratio)
        sampled, device = self._kernels.items, arena.device
        self._indices = torch.zeros(sampled.samples, dtype=torch.int32, device=device)  # the kernels read it as uint32
        self._saved = torch.zeros(sampled.sample_bytes, dtype=torch.uint8, device=device)
        self._sampled = torch.tensor(sampled.sample_counts, dtype=torch.int64, device=HOST)

    def _save(self) -> None:
        self._kernels.save_at(self._arena.address, self._indices, self._saved)

    def count(self, step: int) -> None:
        self.compared = self._sampled
        self._kernels.unchanged_at(self._arena.address, self._saved, self._indices, self._found, self._digits)
        self.counts.copy_(self._found)


class RandomDetector(_SamplingDetector):
    """Detector that compares one random element of each of `samples` equal strata of an item: an unbiased estimate."""

    def begin(self, step: int) -> None:
        key = (self._seed * _GOLDEN + step) % 2**64
        self._kernels.draw(key, self._indices)
        self._save()

    def keep(self, step: int, sent: Sequence[Part]) -> None:
        self.begin(step + 1)

    def standard_errors(self) -> torch.Tensor:
        """Return sqrt(u (1 - u) / (m - 1) (1 - m / n)) for m of n elements, float64 [items].

        u is the fraction of unchanged elements. This is the error of simple random samples without repetition. Strata
        have a smaller error, unless u varies periodically. 0 if m = n; NaN for one sample of several elements.
        """
        sampled, everything = self._sampled.double(), self._all.double()
        share = self.counts / sampled
        found = (share * (1 - share) / (sampled - 1) * (1 - sampled / everything)).sqrt()
        found[self._sampled == 1] = math.nan
        found[self._sampled == self._all] = 0
        return found


class HistoryDetector(_SamplingDetector):
    """Detector that compares the elements that have changed most often. Surveys count the changes of all elements."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        super().__init__(arena, items, algorithm)
        self._interval = algorithm.survey_interval
        self._copy = Copy(arena)
        self._counters = torch.zeros(self._kernels.items.elements, dtype=torch.uint8, device=arena.device)
        self._known = False  # whether there has been a survey, so that counters are valid
        self._surveyed = False  # whether the last `count` included a survey

    def begin(self, step: int) -> None:
        if self._known:
            self._kernels.select(self._counters, self._indices)
            self._save()
        if self._surveys(step):
            self._copy.take()

    def _surveys(self, step: int) -> bool:
        """Return whether a survey follows this step: until the first one, and then every `survey_interval` steps."""
        return not self._known or step % self._interval == 0

    def count(self, step: int) -> None:
        if self._known:
            super().count(step)
        self._surveyed = self._surveys(step)
        if not self._surveyed:
            return
        counts = torch.zeros_like(self._found)
        self._kernels.unchanged(
            self._arena.address, self._copy.address, counts, self._digits, self._counters.data_ptr()
        )
        if not self._known:
            self.counts.copy_(counts)
            self.compared, self._known = self._all, True

    def keep(self, step: int, sent: Sequence[Part]) -> None:
        if self._surveyed:
            self._kernels.select(self._counters, self._indices)
        self._save()
        if self._surveys(step + 1):
            self._copy.take()

    def state(self) -> dict[str, Any]:
        return {"counters": self._counters.clone(), "known": self._known}

    def check_state(self, state: dict[str, Any]) -> None:
        if "counters" not in state:
            raise UsageError("this state has no counters of changes, so its detector was not 'history'")
        if state["counters"].shape != self._counters.shape:
            raise UsageError(
                f"this state has counters of {len(state['counters'])} elements, but there are {len(self._counters)} "
                "here: load it with the same parameters"
            )

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._counters.copy_(state["counters"])
        self._known = state["known"]


class MovementDetector(Detector):
    """Detector that ranks items by the movement of their elements: root mean square, exponential average over steps.

    The count of an item is the number of elements, in all items, that move further than its own. An item that has never
    moved counts all elements. So the threshold is the share of elements sent in every step, for any movement.
    """

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        super().__init__(arena, items, algorithm)
        self._copy = Copy(arena)
        self._memory = algorithm.memory
        self._pairs = [
            (arena.flat(DTYPES[dtype], offset, count), self._copy.view(DTYPES[dtype], offset, length))
            for dtype, offset, count, length in zip(
                items.dtypes.tolist(), items.offsets.tolist(), items.elements.tolist(), items.bytes.tolist()
            )
        ]
        self._averages = torch.zeros(len(items), dtype=torch.float64, device=HOST)
        self.compared = torch.full_like(self._all, int(self._all.sum()))

    def begin(self, step: int) -> None:
        self._copy.take()

    def count(self, step: int) -> None:
        averages = self._averages
        if self._pairs:
            distances = torch.stack([torch.dist(now, before).double() for now, before in self._pairs]).cpu()
            moved = distances / self._all.clamp(min=1).double().sqrt()
            # NaN and Inf count as infinite movement in this step only: an infinite average would stay infinite.
            finite = moved.isfinite()
            self._averages = torch.where(
                finite, self._memory * self._averages + (1 - self._memory) * moved, self._averages
            )
            averages = self._averages.masked_fill(~finite, math.inf)
        values, places = averages.unique(return_inverse=True)  # in ascending order
        elements = torch.zeros(len(values), dtype=torch.int64, device=HOST).index_add_(0, places, self._all)
        further = (elements.sum() - elements.cumsum(0))[places]
        self.counts.copy_(torch.where(averages > 0, further, self.compared))

    def keep(self, step: int, sent: Sequence[Part]) -> None:
        self._copy.take()

    def state(self) -> dict[str, Any]:
        return {"averages": self._averages.clone()}

    def check_state(self, state: dict[str, Any]) -> None:
        if "averages" not in state:
            raise UsageError("this state has no averages of movement, so its detector was not 'movement'")

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self._averages.copy_(state["averages"])


def detector_of(arena: ParameterBuffer, items: Items, algorithm: CaPS) -> Detector:
    """Return the detector that the algorithm's settings name."""
    detectors: dict[str, type[NaiveDetector | RandomDetector | HistoryDetector | MovementDetector]] = {
        "naive": NaiveDetector,
        "random": RandomDetector,
        "history": HistoryDetector,
        "movement": MovementDetector,
    }
    return detectors[algorithm.detector](arena, items, algorithm)
