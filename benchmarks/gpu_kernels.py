"""CUDA kernels against copies in device memory that move the same bytes, and against PyTorch's operations.

  python benchmarks/gpu_kernels.py

  reduce 2->1        a = (a + b) / 2            reads 2, writes 1
  reduce 4->4        a = ... = (a + ... + d) / 4   reads 4, writes 4
  axpby              b = 0.9 b + 0.1 a          reads 2, writes 1
  mix 2->2           a, b = (a + b) / 2, b / 2  reads 2, writes 2
  dots, distance     of a and b                 reads 2
  norm               of a                       reads 1
  unchanged          of c and d, all equal      reads 2
  lars               weights, gradient, velocity   reads 3, writes 2
  flatten            ResNet-50's 161 tensors into one buffer, and unflatten back; sizes scaled to fit
  encode, decode     float32 values with a codec    reads the values, writes their bytes; and the reverse

A copy within device memory reads and writes the same total of bytes. Then calls on all of ResNet-50's 161 tensors are
compared with a copy and with the operations of PyTorch that they replace. Contestants take turns. Times are measured
between CUDA events. Values are random. Calls rotate through more memory than the cache holds, as a training step does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from gpu import place as places
from gpu.codec_calls import LIMITS, codec_calls, codec_of
from gpu.kernels_report import REPORTS
from gpu.place import Call, Place, in_turn
from gpu.resnet_calls import THEIRS, ResNet, resnet_calls
from sordino._core import build_info, kernels
from sordino.bench import command_line
from sordino.bench.resnet import resnet50_shapes
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_bytes
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.timing import Participants, Run, Samples, Watch, rotated

COPY_LIMIT = 0.9
TORCH_LIMIT = 3.0
LARGE = 64 << 20  # bytes from which COPY_LIMIT applies; below, the time of launches decides
SIZES = "1MiB,16MiB,64MiB,256MiB"
DTYPES = (torch.float32, torch.bfloat16)
Task = tuple[str, str, int, Run]  # kernel, dtype, bytes read and written, and a function that runs it
_ROUNDS = 20


def device_race(place: Place, contestants: Mapping[str, Run], budget: float) -> dict[str, Samples]:
    """Time contestants between CUDA events. They take turns, and each round begins with another one."""

    def turn(name: str, count: int) -> float:
        return place.turn(contestants[name], count)[1]

    names, share = list(contestants), budget / _ROUNDS / len(contestants)
    counts = {name: int(np.clip(share / max(min(turn(name, 3) for _ in range(3)), 1e-7), 3, 200)) for name in names}
    samples = {name: Samples() for name in names}
    for number in range(_ROUNDS):
        for name in rotated(names, number):
            samples[name].rounds.append(np.array([turn(name, counts[name])]))
    return samples


def copies(place: Place, moved: int) -> Run:
    """Return a copy that reads and writes `moved` bytes in total, with other buffers each time."""
    count = max(1, moved // 2)
    every = []
    for _ in range(place.sets(moved)):
        source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=place.device)
        every.append(_bind(torch.empty_like(source).copy_, source))
    return in_turn(every)


class Buffers:
    """One set of four operands with random values of a dtype. The last two are equal."""

    def __init__(self, place: Place, size: int, dtype: torch.dtype) -> None:
        self.count = size // dtype.itemsize
        self.operands = [torch.randn(self.count, device=place.device).to(dtype) for _ in range(3)]
        self.operands.append(self.operands[2].clone())
        self.results = torch.zeros(1024, dtype=torch.float64, device=place.device)
        self.rates = torch.full((1024,), 1e-3, dtype=torch.float64, device=place.device)
        self.a, self.b, self.c, self.d = (operand.data_ptr() for operand in self.operands)
        self.single, self.pair, self.triple = ([((self.a, self.b, self.c)[:lists], self.count)] for lists in (1, 2, 3))
        self.mean = [((self.a, self.b, self.a), self.count)]
        self.every = [((self.a, self.b, self.c, self.d) * 2, self.count)]
        self.found, self.rate = self.results.data_ptr(), self.rates.data_ptr()


def tasks(place: Place, size: int, dtype: torch.dtype) -> list[Task]:
    """Return all kernels of this place, on one dtype."""
    cuda, code, stream = place.kernels(), DTYPE_CODES[dtype], place.stream
    same = kernels.Items([(0, size // dtype.itemsize, code)], 1.0)
    averages = [((0, 1), (0,), 0.5), ((1,), (1,), 0.5)]
    calls: dict[str, Call[Buffers]] = {
        "reduce 2->1": (3, "reduce", lambda of: cuda.reduce(Sum, code, of.mean, 2, 1.0, 0.5, stream=stream)),
        "reduce 4->4": (8, "reduce", lambda of: cuda.reduce(Sum, code, of.every, 4, 1.0, 0.25, stream=stream)),
        "axpby": (3, "axpby", lambda of: cuda.axpby(code, of.pair, 0.1, 0.9, stream=stream)),
        "mix 2->2": (
            4,
            "mix",
            lambda of: cuda.mix(code, (of.a, of.b), (of.a, of.b), averages, of.count, stream=stream),
        ),
        "dots": (2, "dots", lambda of: cuda.dots(code, of.pair, of.found, stream=stream)),
        "distance": (2, "squared_distances", lambda of: cuda.squared_distances(code, of.pair, of.found, stream=stream)),
        "norm": (1, "norms", lambda of: cuda.norms(code, of.single, of.found, stream=stream)),
        "unchanged": (2, "unchanged", lambda of: cuda.unchanged(same, of.c, of.d, of.found, stream=stream)),
        "lars": (5, "lars_step", lambda of: cuda.lars_step(code, of.triple, of.rate, 1e-4, 0.9, False, stream=stream)),
    }
    sets = [Buffers(place, size, dtype) for _ in range(place.sets(size))]
    name = str(dtype).removeprefix("torch.")
    return [
        (kernel, name, lists * size, in_turn([_bind(call, one) for one in sets]))
        for kernel, (lists, method, call) in calls.items()
        if hasattr(cuda, method)
    ]


def _bind(function: Callable[..., object], *arguments: object) -> Run:
    return lambda: function(*arguments)


def packing(place: Place, size: int) -> list[Task]:
    """Return flatten and unflatten of tensors that have ResNet-50's proportions and fill about `size` bytes."""
    weights = [int(np.prod(shape)) for _, shape in resnet50_shapes()]
    lengths = [max(4, weight * size // sum(weights) // 4 * 4) for weight in weights]
    lengths[int(np.argmax(lengths))] -= max(0, sum(lengths) - size)
    cuda, stream = place.kernels(), place.stream
    into, back = [], []
    for _ in range(place.sets(2 * size)):
        parts = [torch.randint(0, 256, (length,), dtype=torch.uint8, device=place.device) for length in lengths]
        flat = torch.empty(size, dtype=torch.uint8, device=place.device)
        spans = [(part.data_ptr(), part.numel()) for part in parts]

        def flatten(spans: list[tuple[int, int]] = spans, flat: torch.Tensor = flat, kept: object = parts) -> None:
            cuda.flatten(spans, flat.data_ptr(), stream=stream)

        def unflatten(spans: list[tuple[int, int]] = spans, flat: torch.Tensor = flat, kept: object = parts) -> None:
            cuda.unflatten(flat.data_ptr(), spans, stream=stream)

        into.append(flatten)
        back.append(unflatten)
    moved = 2 * sum(lengths)
    return [("flatten", "any", moved, in_turn(into)), ("unflatten", "any", moved, in_turn(back))]


def measure(place: Place, size: int, budget: float, wanted: Callable[[str], bool]) -> list[Results]:
    """Return the rows of one size. `ratio` is the bandwidth over that of the copy."""
    rows = []
    makers = [lambda dtype=dtype: tasks(place, size, dtype) for dtype in DTYPES]
    for make in (*makers, lambda: packing(place, size), lambda: codec_calls(place, size, wanted)):
        for kernel, dtype, moved, run in make():
            if not wanted(kernel):
                continue
            samples = device_race(place, {"kernel": run, "copy": copies(place, moved)}, budget)
            times = {name: one.summary() for name, one in samples.items()}
            rows.append(
                {
                    "kernel": kernel,
                    "dtype": dtype,
                    "bytes": size,
                    "moved": moved,
                    "times": times,
                    "ratio": times["copy"]["median"] / times["kernel"]["median"],
                    "gbps": moved / times["kernel"]["median"] / 1e9,
                }
            )
    return rows


def measure_resnet(place: Place, budget: float, wanted: Callable[[str], bool], narrow: int = 1) -> list[Results]:
    """Time calls on all of ResNet-50's tensors, a copy, and PyTorch's operations.

    `ratio` (`copy_ratio`) is the time of PyTorch's operations (of the copy) over the time of the call.
    """
    shapes = [shape for _, shape in resnet50_shapes(narrow)]
    size = 4 * sum(int(np.prod(shape)) for shape in shapes)
    sets = [ResNet(place, shapes) for _ in range(place.sets(size))]
    table = []
    for kernel, (lists, _, call) in resnet_calls(place, sets[0]).items():
        if not wanted(kernel):
            continue
        contestants = {
            "kernel": in_turn([_bind(call, of) for of in sets]),
            "torch": in_turn([_bind(THEIRS[kernel], of) for of in sets]),
            "copy": copies(place, lists * size),
        }
        times = {name: one.summary() for name, one in device_race(place, contestants, budget).items()}
        ratios = {name: times[name]["median"] / times["kernel"]["median"] for name in ("torch", "copy")}
        table.append({"kernel": kernel, "times": times, "ratio": ratios["torch"], "copy_ratio": ratios["copy"]})
    return table


def targets(rows: Sequence[Results], resnet: Sequence[Results]) -> list[Results]:
    """Return targets for the worst dtype of each kernel at each large size, and for each call on ResNet-50's tensors.

    Codecs have lower targets than other kernels; the sparse codec has none.
    """
    entries = []
    for kernel, size in dict.fromkeys((row["kernel"], row["bytes"]) for row in rows if row["bytes"] >= LARGE):
        codec = codec_of(kernel)
        if codec is not None and codec not in LIMITS:
            continue
        limit = COPY_LIMIT if codec is None else LIMITS[codec]
        chosen = [row for row in rows if row["kernel"] == kernel and row["bytes"] == size]
        worst = min(chosen, key=lambda row: row["ratio"])
        what = f"{kernel}, {format_bytes(size)} (worst: {worst['dtype']}), bandwidth over the copy's"
        entries.append(verdicts.target(what, worst["ratio"], limit, at_least=True))
    for row in resnet:
        what = f"{row['kernel']} of ResNet-50's tensors, time of PyTorch's operations over ours"
        entries.append(verdicts.target(what, row["ratio"], TORCH_LIMIT, at_least=True))
    return entries


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark in this process. NotBuilt without a GPU."""
    options = command_line.parser("gpu_kernels", __doc__, 0.5, "kernel, dtype and size")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"bytes of a tensor (default {SIZES})")
    options.add_argument("--only", default="", metavar="WORD", help="only kernels whose names contain WORD")
    places.add_option(options)
    chosen = options.parse_args(argv)
    place = places.find("gpu_kernels", chosen.pretend)
    budget = 0.02 if chosen.quick else chosen.budget
    narrow = 1
    if chosen.pretend:
        chosen.quick, chosen.sizes, budget, narrow = True, "64KiB", 0.001, 16
    found_machine, watch = machines.machine(None), Watch(Participants())
    rows = []
    for text in chosen.sizes.split(","):
        size = command_line.parse_bytes(text)
        rows += measure(place, size, budget, lambda kernel: chosen.only in kernel)
        records.log(f"{format_bytes(size)} a tensor: done")
    resnet = measure_resnet(place, budget, lambda kernel: chosen.only in kernel, narrow)
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "gpu_kernels",
        "name": "gpu_kernels",
        "machine": found_machine,
        "device": place.name,
        "cache": place.cache,
        "cuda": build_info()["cuda"],
        "rows": rows,
        "resnet": resnet,
        "targets": [] if chosen.pretend else targets(rows, resnet),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
