"""Time to detect unchanged parameters in ResNet-50's 161 tensors, on one core. Contestants take turns in one run.

  naive       compare all elements, then store all values again, as after an exchange of everything: the worst case
  random      the same with a random hundredth of each tensor
  history     the same with the hundredth that has changed most often; a survey of all, every 20th step, is timed alone
  movement    add up the distances that elements move, then store all values
  source's    naive, random and history without kernels, as the source describes them: tensor by tensor, with each count
              fetched, random elements drawn by Python, and the updates of all elements counted in every step
  add         torch's add_, which reads and writes as much as the comparison of naive: the bound by memory

Before each run, outside of the timing, half of the elements change by one bit. Other elements change each time, because
kernels do not write equal values.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

import sordino.torch as hvd
from sordino.algorithms import CaPS
from sordino.algorithms.caps import Detection
from sordino.algorithms.caps.detectors import detector_of
from sordino.algorithms.caps.items import Items
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results
from sordino.runtime.context import current
from sordino.runtime.exchange.flat_buffer import ParameterBuffer
from sordino.timing import Participants, Run, race

RATIO = CaPS().sample_ratio
DETECTORS: tuple[Detection, ...] = ("naive", "random", "history", "movement")
_PATTERNS = 1 << 16  # number of offsets in an array of random bits; each gives another change


class Changes(Participants):
    """A single participant whose barrier, which is not timed, changes half of the elements of an arena."""

    def __init__(self, arena: ParameterBuffer) -> None:
        super().__init__()
        self._values = arena.flat(torch.int32, 0, arena.layout.bytes // 4)
        generator = torch.Generator().manual_seed(1)
        count = len(self._values) + _PATTERNS
        self._bits = torch.randint(0, 2, (count,), dtype=torch.int32, generator=generator)
        self._random = np.random.Generator(np.random.PCG64(1))

    def barrier(self) -> None:
        begin = int(self._random.integers(_PATTERNS))
        self._values.bitwise_xor_(self._bits[begin : begin + len(self._values)])


class Steps:
    """A detector's work in steps in which everything is sent."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        self.detector = detector_of(arena, items, algorithm)
        self._sent = items.parts(np.ones(len(items), dtype=bool))
        self._step = 1
        self.detector.begin(self._step)

    def count(self) -> None:
        """Count unchanged elements: the first half of a step."""
        self.detector.count(self._step)

    def run(self) -> None:
        """Count unchanged elements, and store the sent values."""
        self.detector.count(self._step)
        self.detector.keep(self._step, self._sent)
        self._step += 1


class Ordinary:
    """The source's three detectors in torch and Python, tensor by tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pairs = [(tensor.view(-1), tensor.flatten().clone()) for tensor in tensors]
        self._updates = [torch.zeros_like(before) for _, before in self._pairs]

    def naive(self) -> list[int]:
        """Compare all elements."""
        return self._each(lambda now, before, _: (now == before).sum())

    def random(self) -> list[int]:
        """Compare elements that Python draws."""

        def compare(now: torch.Tensor, before: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            chosen = torch.tensor(random.sample(range(len(now)), self._few(now)))
            return (now[chosen] == before[chosen]).sum()

        return self._each(compare)

    def history(self) -> list[int]:
        """Count the updates of all elements, and compare the elements with the most updates."""

        def compare(now: torch.Tensor, before: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
            updates += now != before
            chosen = updates.topk(self._few(now)).indices
            return (now[chosen] == before[chosen]).sum()

        return self._each(compare)

    def _few(self, tensor: torch.Tensor) -> int:
        return max(1, int(RATIO * len(tensor)))

    def _each(self, compare: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> list[int]:
        counts = []
        for (now, before), updates in zip(self._pairs, self._updates, strict=True):
            counts.append(int(compare(now, before, updates).item()))
            before.copy_(now)
        return counts


def addition(length: int) -> Run:
    """Return a function that reads two arrays of `length` bytes and writes one of them."""
    target, other = torch.zeros(length // 4, dtype=torch.int32), torch.ones(length // 4, dtype=torch.int32)
    return lambda: target.add_(other)


def measure(narrow: int, budget: float) -> Results:
    """Time all contestants in turns.

    Args:
        narrow: divisor of ResNet-50's widths.
        budget: seconds, without the changes between runs.

    Returns:
        Milliseconds per step of each contestant, round by round; and the share of elements that naive counts as
        unchanged, which should be a half.
    """
    hvd.init()
    try:
        named = resnet50_shapes(narrow)
        tensors = [torch.full(shape, 0.01) for _, shape in named]
        arena = ParameterBuffer(current(), [name for name, _ in named], tensors, "model")
        items, changes = Items.of(arena, None), Changes(arena)
        ordinary, counting = Ordinary(arena.tensors), Steps(arena, items, CaPS())
        never, always = 1 << 40, 1
        runs: dict[str, Run] = {
            "count": counting.count,
            **{name: Steps(arena, items, CaPS(name)).run for name in DETECTORS if name != "history"},
            "history": Steps(arena, items, CaPS("history", survey_interval=never)).run,
            "survey": Steps(arena, items, CaPS("history", survey_interval=always)).run,
            "source's naive": ordinary.naive,
            "source's random": ordinary.random,
            "source's history": ordinary.history,
            "add": addition(int(items.bytes.sum())),
        }
        samples = race(runs, changes, budget, rounds=10)
        times = {name: 1000 * one.round_medians for name, one in samples.items()}
        interval = CaPS().survey_interval
        times["history"] = times["history"] + (times.pop("survey") - times["history"]) / interval
        changes.barrier()
        counting.count()
        unchanged = float(counting.detector.counts.sum()) / float(counting.detector.compared.sum())
        return {"ms": {name: one.tolist() for name, one in times.items()}, "unchanged": unchanged}
    finally:
        hvd.shutdown()
