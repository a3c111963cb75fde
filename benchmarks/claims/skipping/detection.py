"""What finding unchanged parameters costs a step: ResNet-50's 161 tensors, one core, interleaved in one run.

  python benchmarks/skipping.py detection

  count       "naive" counts, and keeps what it has read: the kernel alone
  still       the same where nothing has changed, so nothing is written
  naive       counting, and keeping again all that an exchange of everything would have changed: the worst case
  random      the same with a hundredth of each tensor
  history     the same, on average over a survey interval: steps without a survey and steps with one (and with the copy
              that it needs) are timed by themselves, and there is one of the latter in an interval
  eq          what one would write without kernels: (p == before).sum() and before.copy_(p) for each tensor
  eq fetched  the same, each number fetched by .item()

The floor is the faster of torch's copy_ and numpy's copyto of a buffer so long that it reads and writes as many bytes
in all as the kernel: it reads both arrays and writes one. As a copy may make the processor read what it overwrites,
"add" stands beside it: torch's add_, which reads and writes what the kernel does. Before each timed run (of the floor,
too) half of the elements change, always others, for kernels do not write what is equal. They change by one bit, outside
of the timing; for "still" they change back at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

import sordino.torch as hvd
from claims.skipping.report import REPORTS
from sordino.algorithms import ParameterSkipping
from sordino.algorithms.caps.detectors import detector_of
from sordino.algorithms.caps.items import Items
from sordino.bench import command_line
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results, machines, records, verdicts
from sordino.runtime.context import current
from sordino.runtime.flat_buffer import ParameterBuffer
from sordino.timing import Participants, Run, Samples, Watch, race, summarize

LIMIT = 1.15
SOURCE_MS = 23  # CaPS, detection on a P100
BLOCK = 64 * 1024
_PATTERNS = 1 << 16  # half-changes that follow from one array, each from another place in it on
_QUICK = 20  # tensors


class Changes(Participants):
    """A single participant whose barrier, which is outside of the timing, changes half of the elements of an arena."""

    def __init__(self, arena: ParameterBuffer) -> None:
        super().__init__()
        self._values = arena.flat(torch.int32, 0, arena.layout.bytes // 4)
        generator = torch.Generator().manual_seed(1)
        count = len(self._values) + _PATTERNS
        self._bits = torch.randint(0, 2, (count,), dtype=torch.int32, generator=generator)
        self._random = np.random.Generator(np.random.PCG64(1))
        self._times = 1

    def barrier(self) -> None:
        begin = int(self._random.integers(_PATTERNS))
        for _ in range(self._times):
            self._values.bitwise_xor_(self._bits[begin : begin + len(self._values)])

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Changes what changes back at once: caches hold what they hold for the others, and no element is another."""
        self._times = 2
        yield
        self._times = 1


class Steps:
    """What a detector does in a step after which everything is sent."""

    def __init__(self, arena: ParameterBuffer, items: Items, algorithm: ParameterSkipping) -> None:
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
    """Comparing and keeping in torch, tensor by tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._pairs = [(tensor, tensor.clone()) for tensor in tensors]

    def run(self) -> list[torch.Tensor]:
        """Numbers as tensors."""
        counts = []
        for now, before in self._pairs:
            counts.append((now == before).sum())
            before.copy_(now)
        return counts

    def run_fetched(self) -> list[int]:
        """Numbers as Python's."""
        counts = []
        for now, before in self._pairs:
            counts.append(int((now == before).sum().item()))
            before.copy_(now)
        return counts


def copies(moved: int) -> dict[str, Run]:
    """Copies that read and write so many bytes together."""
    source, target = torch.ones(moved // 2, dtype=torch.uint8), torch.zeros(moved // 2, dtype=torch.uint8)
    from_array, to_array = source.numpy(), target.numpy()
    return {"torch": lambda: target.copy_(source), "numpy": lambda: np.copyto(to_array, from_array)}


def addition(length: int) -> Run:
    """Reads two arrays of so many bytes and writes one of them."""
    target, other = torch.zeros(length // 4, dtype=torch.int32), torch.ones(length // 4, dtype=torch.int32)
    return lambda: target.add_(other)


def over_an_interval(plain: Samples, survey: Samples, interval: int) -> dict[str, float]:
    """What steps take on average when one in `interval` is a survey, round by round."""
    return summarize(plain.round_medians + (survey.round_medians - plain.round_medians) / interval)


def is_right(arena: ParameterBuffer, items: Items, changes: Changes) -> bool:
    """Whether all detectors see a change of half of the elements: the naive one exactly, the others in their samples
    (which are large enough in all to be within a tenth)."""
    steps = {name: Steps(arena, items, ParameterSkipping(name)) for name in ("naive", "random", "history")}
    for _ in range(2):  # history knows its sample after the first
        ordinary = Ordinary(arena.tensors)
        changes.barrier()
        for one in steps.values():
            one.run()
    expected = np.array(ordinary.run_fetched())
    found = np.bincount(items.tensors, weights=steps["naive"].detector.counts.numpy())
    shares = [float(one.detector.counts.sum() / one.detector.compared.sum()) for one in steps.values()]
    return bool((found == expected).all()) and all(abs(share - 0.5) < 0.1 for share in shares)


def measure(granularity: str, count: int | None, budget: float, least_rounds: int) -> Results:
    """The row of one granularity, of the first `count` tensors."""
    named = resnet50_shapes()[:count]
    tensors = [torch.full(shape, 0.01) for _, shape in named]
    arena = ParameterBuffer(current(), [name for name, _ in named], tensors, "model")
    items = Items.of(arena, BLOCK if granularity == "block" else None)
    changes = Changes(arena)
    right = is_right(arena, items, changes)
    length = int(items.bytes.sum())
    usual, ordinary = ParameterSkipping(), Ordinary(tensors)
    never, always = 1 << 40, 1
    runs: dict[str, Run] = {
        "count": Steps(arena, items, usual).count,
        "still": Steps(arena, items, usual).count,
        "naive": Steps(arena, items, usual).run,
        "random": Steps(arena, items, ParameterSkipping("random")).run,
        "history, no survey": Steps(arena, items, ParameterSkipping("history", survey_interval=never)).run,
        "history, survey": Steps(arena, items, ParameterSkipping("history", survey_interval=always)).run,
        **({"eq": ordinary.run, "eq fetched": ordinary.run_fetched} if granularity == "tensor" else {}),
        "add": addition(length),
        **copies(3 * length),
    }
    samples = race(runs, changes, budget, least_rounds=least_rounds, turns={"still": changes.undone})
    times = {name: one.summary() for name, one in samples.items()}
    times["history"] = over_an_interval(
        samples["history, no survey"], samples["history, survey"], usual.survey_interval
    )
    floor = min(("torch", "numpy"), key=lambda name: times[name]["median"])
    return {
        "granularity": granularity,
        "items": len(items),
        "bytes": length,
        "times": times,
        "floor": floor,
        "right": right,
    }


def targets(rows: Sequence[Results]) -> list[Results]:
    """The kernel is as fast as memory, and samples are cheaper than everything."""
    entries = []
    for row in rows:
        pairs = (
            ("count", row["floor"], LIMIT),
            ("count", "add", LIMIT),
            ("random", "naive", 1.0),
            ("history", "naive", 1.0),
        )
        for over, under, limit in pairs:
            value = row["times"][over]["median"] / row["times"][under]["median"]
            what = f"by {row['granularity']}: {over} over {'floor' if under == row['floor'] else under}"
            entries.append(verdicts.target(what, value, limit, at_least=False))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Runs in this process. Status 1 if a detector counted something wrong."""
    options = command_line.parser("skipping detection", __doc__, 3.0, "granularity, without the changes between runs")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    hvd.init()
    found_machine, watch = machines.machine("one process"), Watch(Participants())
    size, budget, least_rounds = (_QUICK, 0.02, 2) if chosen.quick else (None, chosen.budget, 20)
    rows = [measure(granularity, size, budget, least_rounds) for granularity in ("tensor", "block")]
    found_machine["others"] = watch.others()
    hvd.shutdown()
    wrong = [f"by {row['granularity']}" for row in rows if not row["right"]]
    results: Results = {
        "benchmark": "skipping_detection",
        "name": "skipping_detection",
        "machine": found_machine,
        "sample_ratio": ParameterSkipping().sample_ratio,
        "survey_interval": ParameterSkipping().survey_interval,
        "block_bytes": BLOCK,
        "source_ms": SOURCE_MS,
        "rows": rows,
        "wrong": wrong,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 1 if wrong else 0
