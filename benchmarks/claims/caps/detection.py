"""What finding unchanged parameters costs a step: ResNet-50's 161 tensors, one core, interleaved in one run.

  naive       counting, and keeping again all that an exchange of everything would have changed: the worst case
  random      the same with a hundredth of each tensor
  history     the same; a step in which it surveys all elements is timed by itself, and one of 20 is one
  movement    how far elements move, and keeping all of them
  source's    naive, random and history as one would write them without kernels, and as the source describes them: by
              tensor, each number fetched, random elements drawn by Python, all elements' updates counted in every step
  add         torch's add_, which reads and writes as much as naive's counting: what memory allows

Before each timed run half of the elements change, always others, for kernels do not write what is equal. They change by
one bit, outside of the timing.
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
_PATTERNS = 1 << 16  # half-changes that follow from one array, each from another place in it on


class Changes(Participants):
    """A single participant whose barrier, which is outside of the timing, changes half of the elements of an arena."""

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
    """What a detector does in a step after which everything is sent."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: CaPS) -> None:
        self.detector = detector_of(arena, items, algorithm)
        self._sent = items.parts(np.ones(len(items), dtype=bool))
        self._step = 1
        self.detector.begin(self._step)

    def count(self) -> None:
        """The first half."""
        self.detector.count(self._step)

    def run(self) -> None:
        """A step."""
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
        """Compare those that Python draws."""

        def compare(now: torch.Tensor, before: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            chosen = torch.tensor(random.sample(range(len(now)), self._few(now)))
            return (now[chosen] == before[chosen]).sum()

        return self._each(compare)

    def history(self) -> list[int]:
        """Count updates of all, and compare those that have had most."""

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
    """Reads two arrays of so many bytes and writes one of them."""
    target, other = torch.zeros(length // 4, dtype=torch.int32), torch.ones(length // 4, dtype=torch.int32)
    return lambda: target.add_(other)


def measure(narrow: int, budget: float) -> Results:
    """Time all ways against each other.

    Args:
        narrow: by what ResNet-50's widths are divided.
        budget: seconds, without the changes between runs.

    Returns:
        Milliseconds a step, round by round, of each; and the share that the kernel sees unchanged, of which half is.
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
