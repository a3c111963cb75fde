"""CPU kernels compared with copies that move the same bytes, on one core, interleaved in one run.

  python benchmarks/kernels.py

  reduce 2->1   a = (a + b) / 2        reads 2, writes 1
  reduce 2->2   a = b = (a + b) / 2    reads 2, writes 2
  reduce 4->4   the same of four       reads 4, writes 4
  scale         a = 0.5 a              reads 1, writes 1
  axpby         b = 0.9 b + 0.1 a      reads 2, writes 1
  flatten       ResNet-50's 161 tensors into one buffer, and unflatten back; sizes are scaled to fit
  encode        normally distributed values with a codec (docs/compression.md)
  decode        a = a + 0.5 * the decoded values

Floating types average. Integers and bool sum, because training does not average them. The peer is the faster one of
torch's copy_ and numpy's copyto, with a buffer of such a length that it reads and writes as many bytes in all. For
codecs, it is a copy of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from sordino._core import kernels
from sordino.bench import command_line
from sordino.bench.report import REPORTS
from sordino.bench.resnet import resnet50_shapes
from sordino.codecs import Int4, Int8, Sign, TopK, TwoBit
from sordino.errors import UsageError
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_bytes
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.timing import Participants, Run, Watch, race

LIMIT = 1.15
CODEC_LIMIT = 2.0
CODEC = "codec "  # prefix of the name of a codec, which takes the place of a dtype
SIZES = "64MiB,256KiB"
Task = tuple[str, str, int, Run]  # kernel, dtype, bytes read and written, function that runs it


class Buffers:
    """Memory shared by all kernels of one size: five operands of `size` bytes, and two buffers for longer copies."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.operands = [torch.zeros(size, dtype=torch.uint8) for _ in range(5)]
        self.source = torch.ones(4 * size, dtype=torch.uint8)
        self.target = torch.zeros(4 * size, dtype=torch.uint8)

    def places(self, count: int) -> list[int]:
        return [operand.data_ptr() for operand in self.operands[:count]]

    def copies(self, moved: int) -> dict[str, Run]:
        """Return copies that read and write `moved` bytes in all."""
        half = moved // 2
        source, target = self.source[:half], self.target[:half]
        from_array, to_array = source.numpy(), target.numpy()
        return {"torch": lambda: target.copy_(source), "numpy": lambda: np.copyto(to_array, from_array)}


def _reduce(code: int, sources: list[int], targets: list[int], count: int, factor: float) -> Run:
    return lambda: kernels.reduce(Sum, code, sources, targets, count, 1.0, factor)


def tasks(buffers: Buffers) -> list[Task]:
    """Return every kernel with every dtype that it supports."""
    size = buffers.size
    found: list[Task] = []
    for dtype, code in DTYPE_CODES.items():
        name, count = str(dtype).removeprefix("torch."), size // dtype.itemsize
        for inputs, outputs in ((2, 1), (2, 2), (4, 4)):
            factor = 1 / inputs if dtype.is_floating_point else 1.0
            run = _reduce(code, buffers.places(inputs), buffers.places(outputs), count, factor)
            found.append((f"reduce {inputs}->{outputs}", name, (inputs + outputs) * size, run))
        first, second = buffers.places(2)
        if dtype != torch.bool:
            found.append(("scale", name, 2 * size, _scale(code, first, count, 0.5)))
        if dtype.is_floating_point:
            found.append(("axpby", name, 3 * size, _axpby(code, first, second, count)))
    return found + _packing(buffers) + _coding(buffers)


def _scale(code: int, place: int, count: int, factor: float) -> Run:
    return lambda: kernels.scale(code, place, count, factor)


def _axpby(code: int, x: int, y: int, count: int) -> Run:
    return lambda: kernels.axpby(code, x, y, count, 0.1, 0.9)


def _packing(buffers: Buffers) -> list[Task]:
    """Return flatten and unflatten of tensors with ResNet-50's proportions, each with its own memory."""
    weights = [int(np.prod(shape)) for _, shape in resnet50_shapes()]
    lengths = [max(4, weight * buffers.size // sum(weights) // 4 * 4) for weight in weights]
    lengths[int(np.argmax(lengths))] -= max(0, sum(lengths) - buffers.size)
    parts = [torch.zeros(length, dtype=torch.uint8) for length in lengths]
    spans = [(part.data_ptr(), part.numel()) for part in parts]
    flat = buffers.operands[4].data_ptr()

    def flatten(kept: Sequence[torch.Tensor] = parts) -> None:
        kernels.flatten(spans, flat)

    def unflatten(kept: Sequence[torch.Tensor] = parts) -> None:
        kernels.unflatten(flat, spans)

    moved = 2 * sum(lengths)
    return [("flatten", "any", moved, flatten), ("unflatten", "any", moved, unflatten)]


def _coding(buffers: Buffers) -> list[Task]:
    """Return the codecs of the core, at their defaults."""
    values = torch.randn(buffers.size // torch.float32.itemsize, generator=torch.Generator().manual_seed(1))
    total = buffers.operands[0].view(torch.float32)
    found: list[Task] = []
    for codec in (Int8(), Int4(), TwoBit(), Sign(), TopK()):
        coder = codec.coder()
        room = torch.empty(coder.bytes(values.numel()), dtype=torch.uint8)
        infinite = torch.zeros(1, dtype=torch.int32)
        coder.encode(values, room, infinite)
        name, moved = CODEC + type(codec).__name__, 2 * buffers.size
        found.append(("encode", name, moved, partial(coder.encode, values, room, infinite)))
        found.append(("decode", name, moved, partial(coder.decode, room, total, 0.5, True)))
    return found


def measure(size: int, budget: float, wanted: Callable[[str], bool]) -> list[Results]:
    """Measure the rows of one size."""
    buffers = Buffers(size)
    rows = []
    for kernel, dtype, moved, run in tasks(buffers):
        if not wanted(kernel):
            continue
        samples = race({"kernel": run} | buffers.copies(moved), Participants(), budget)
        entries = {name: one.summary() for name, one in samples.items()}
        copy = min(("torch", "numpy"), key=lambda name: entries[name]["median"])
        rows.append(
            {
                "kernel": kernel,
                "dtype": dtype,
                "bytes": size,
                "moved": moved,
                "times": entries,
                "copy": copy,
                "ratio": entries["kernel"]["median"] / entries[copy]["median"],
                "gbps": moved / entries["kernel"]["median"] / 1e9,
            }
        )
    return rows


def targets(rows: Sequence[Results]) -> list[Results]:
    """Return the target of each kernel and group of dtypes, for the worst dtype at the largest size."""
    entries = []
    largest = max((row["bytes"] for row in rows), default=0)
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = [row for row in rows if row["kernel"] == kernel and row["bytes"] == largest]
        for title, limit in (
            ("floats", LIMIT),
            ("integers and bool", LIMIT),
            ("bytes", LIMIT),
            ("codecs", CODEC_LIMIT),
        ):
            chosen = [row for row in found if _group_of(row["dtype"]) == title]
            if chosen:
                worst = max(chosen, key=lambda row: row["ratio"])
                what = f"{kernel}, {title}, {format_bytes(largest)} (worst: {worst['dtype']})"
                entries.append(verdicts.target(what, worst["ratio"], limit, at_least=False))
    return entries


def _group_of(dtype: str) -> str:
    """Return the group of dtypes, or of codecs, that a limit is for."""
    if dtype.startswith(CODEC):
        return "codecs"
    return "bytes" if dtype == "any" else "floats" if "float" in dtype else "integers and bool"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in this process."""
    options = command_line.parser("kernels", __doc__, 0.8, "kernel, dtype and size")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"bytes a tensor (default {SIZES})")
    options.add_argument("--only", default="", metavar="WORD", help="only kernels whose name contains this")
    chosen = options.parse_args(argv)
    torch.set_num_threads(1)
    found_machine, watch = machines.machine(None), Watch(Participants())
    rows = []
    for text in chosen.sizes.split(","):
        size = command_line.parse_bytes(text)
        rows += measure(size, 0.02 if chosen.quick else chosen.budget, lambda kernel: chosen.only in kernel)
        records.log(f"{format_bytes(size)} a tensor: done")
    if not rows:
        raise UsageError(f"--only {chosen.only}: no kernel has this in its name")
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "kernels",
        "name": "kernels",
        "machine": found_machine,
        "limit": LIMIT,
        "rows": rows,
        "targets": targets(rows),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0
