"""The CUDA kernels against copies in device memory that move the same bytes, interleaved in one run.

  python benchmarks/gpu_kernels.py

  reduce 2->1        a = (a + b) / 2            reads 2, writes 1
  reduce 4->4        a = ... = (a + ... + d) / 4   reads 4, writes 4
  axpby              b = 0.9 b + 0.1 a          reads 2, writes 1
  mix 2->2           a, b = (a + b) / 2, b / 2  reads 2, writes 2
  dots, distance     of a and b                 reads 2
  norm               of a                       reads 1
  unchanged          of a and b, all equal      reads 2
  lars               weights, gradient, velocity   reads 3, writes 2
  flatten            ResNet-50's 161 tensors into one buffer, and unflatten back; sizes scaled to fit

The peer is a copy within device memory so long that it reads and writes as many bytes in all. Then single calls on
ResNet-50's 161 tensors, against the operations of PyTorch that they replace. Times are the device's, between events.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from gpu.kernels_report import REPORTS
from sordino._core import build_info, cuda_kernels, kernels
from sordino.bench import command_line
from sordino.bench.resnet import resnet50_shapes
from sordino.errors import NotBuilt
from sordino.report import Results, machines, records, verdicts
from sordino.report.tables import format_bytes
from sordino.runtime.dtypes import DTYPE_CODES
from sordino.runtime.operation import Sum
from sordino.timing import Participants, Run, Samples, Watch

COPY_LIMIT = 0.9
TORCH_LIMIT = 3.0
LARGE = 64 << 20  # bytes from which COPY_LIMIT counts: below, launches do
SIZES = "1MiB,16MiB,64MiB,256MiB"
DTYPES = (torch.float32, torch.bfloat16)
Task = tuple[str, str, int, Run]  # kernel, dtype, bytes read and written, what runs it
_ROUNDS = 20


def device_race(contestants: Mapping[str, Run], budget: float) -> dict[str, Samples]:
    """Times what runs on the device, between events; contestants take turns, and begin by turns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def turn(name: str, count: int) -> float:
        begin.record()
        for _ in range(count):
            contestants[name]()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / count

    names, share = list(contestants), budget / _ROUNDS / len(contestants)
    counts = {name: int(np.clip(share / max(min(turn(name, 3) for _ in range(3)), 1e-7), 3, 200)) for name in names}
    samples = {name: Samples() for name in names}
    for number in range(_ROUNDS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].rounds.append(np.array([turn(name, counts[name])]))
    return samples


class Buffers:
    """Device memory that all kernels of one size share."""

    def __init__(self, size: int) -> None:
        self.size, self.cuda = size, cuda_kernels.CudaKernels(torch.cuda.current_device())
        self.operands = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(4)]
        self.source = torch.ones(4 * size, dtype=torch.uint8, device="cuda")
        self.target = torch.zeros(4 * size, dtype=torch.uint8, device="cuda")
        self.results = torch.zeros(1024, dtype=torch.float64, device="cuda")

    def copy(self, moved: int) -> Run:
        """A copy that reads and writes `moved` bytes together."""
        source, target = self.source[: moved // 2], self.target[: moved // 2]
        return lambda: target.copy_(source)


def tasks(buffers: Buffers) -> list[Task]:
    """Every kernel on the dtypes that training uses."""
    cuda, size = buffers.cuda, buffers.size
    stream, results = torch.cuda.current_stream().cuda_stream, buffers.results.data_ptr()
    a, b, c, d = (operand.data_ptr() for operand in buffers.operands)
    found: list[Task] = []
    for dtype in DTYPES:
        name, code, count = str(dtype).removeprefix("torch."), DTYPE_CODES[dtype], size // dtype.itemsize
        pair, single = [((a, b), count)], [((a,), count)]
        same = kernels.Items([(0, count, code)], 1.0)
        averages = [((0, 1), (0,), 0.5), ((1,), (1,), 0.5)]
        runs: dict[str, tuple[int, Run]] = {
            "reduce 2->1": (3, _bind(cuda.reduce, Sum, code, [((a, b, a), count)], 2, 1.0, 0.5, stream=stream)),
            "reduce 4->4": (8, _bind(cuda.reduce, Sum, code, [((a, b, c, d) * 2, count)], 4, 1.0, 0.25, stream=stream)),
            "axpby": (3, _bind(cuda.axpby, code, pair, 0.1, 0.9, stream=stream)),
            "mix 2->2": (4, _bind(cuda.mix, code, (a, b), (a, b), averages, count, stream=stream)),
            "dots": (2, _bind(cuda.dots, code, pair, results, stream=stream)),
            "distance": (2, _bind(cuda.squared_distances, code, pair, results, stream=stream)),
            "norm": (1, _bind(cuda.norms, code, single, results, stream=stream)),
            "unchanged": (2, _bind(cuda.unchanged, same, c, d, results, stream=stream)),
            "lars": (
                5,
                _bind(cuda.lars_step, code, [((a, b, c), count)], results + 4096, 1e-4, 0.9, False, stream=stream),
            ),
        }
        found += [(kernel, name, lists * size, run) for kernel, (lists, run) in runs.items()]
    return found + _packing(buffers, stream)


def _bind(function: Callable[..., None], *arguments: object, **named: object) -> Run:
    return lambda: function(*arguments, **named)


def _packing(buffers: Buffers, stream: int) -> list[Task]:
    """flatten and unflatten of tensors with ResNet-50's proportions, each in memory of its own."""
    weights = [int(np.prod(shape)) for _, shape in resnet50_shapes()]
    lengths = [max(4, weight * buffers.size // sum(weights) // 4 * 4) for weight in weights]
    lengths[int(np.argmax(lengths))] -= max(0, sum(lengths) - buffers.size)
    parts = [torch.zeros(length, dtype=torch.uint8, device="cuda") for length in lengths]
    spans, flat = [(part.data_ptr(), part.numel()) for part in parts], buffers.operands[3].data_ptr()

    def flatten(kept: Sequence[torch.Tensor] = parts) -> None:
        buffers.cuda.flatten(spans, flat, stream=stream)

    def unflatten(kept: Sequence[torch.Tensor] = parts) -> None:
        buffers.cuda.unflatten(flat, spans, stream=stream)

    moved = 2 * sum(lengths)
    return [("flatten", "any", moved, flatten), ("unflatten", "any", moved, unflatten)]


def measure(size: int, budget: float, wanted: Callable[[str], bool]) -> list[Results]:
    """The rows of one size. A ratio is the bandwidth over that of the copy."""
    buffers, rows = Buffers(size), []
    for kernel, dtype, moved, run in tasks(buffers):
        if not wanted(kernel):
            continue
        samples = device_race({"kernel": run, "copy": buffers.copy(moved)}, budget)
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


def measure_resnet(budget: float, wanted: Callable[[str], bool]) -> list[Results]:
    """One call on all of ResNet-50's tensors. A ratio is how many times longer PyTorch's operations take."""
    cuda, code = cuda_kernels.CudaKernels(torch.cuda.current_device()), DTYPE_CODES[torch.float32]
    stream = torch.cuda.current_stream().cuda_stream
    x, y, z = ([torch.ones(shape, device="cuda") for _, shape in resnet50_shapes()] for _ in range(3))
    lengths = [one.numel() for one in x]
    flat = torch.zeros(sum(lengths), device="cuda")
    before = torch.zeros_like(flat)
    starts = np.cumsum([0, *lengths[:-1]])
    items = kernels.Items([(4 * int(at), n, code) for at, n in zip(starts, lengths, strict=True)], 1.0)
    now_parts, before_parts = (torch.split(one, lengths) for one in (flat, before))
    results = torch.ones(4 * len(lengths), dtype=torch.float64, device="cuda")
    spans = [(one.data_ptr(), 4 * one.numel()) for one in x]

    def rows(*lists: list[torch.Tensor]) -> list[tuple[tuple[int, ...], int]]:
        return [(tuple(one.data_ptr() for one in row), row[0].numel()) for row in zip(*lists, strict=True)]

    def torch_mean() -> None:
        torch._foreach_add_(x, y)
        torch._foreach_mul_(x, 0.5)

    def torch_axpby() -> None:
        torch._foreach_mul_(y, 0.9)
        torch._foreach_add_(y, x, alpha=0.1)

    def torch_unflatten() -> None:
        torch._foreach_copy_(x, _unflatten_dense_tensors(flat, x))

    def torch_unchanged() -> object:
        counts = [torch.eq(now, then).sum() for now, then in zip(now_parts, before_parts, strict=True)]
        before.copy_(flat)
        return counts

    def torch_lars() -> None:
        changes = torch._foreach_add(y, x, alpha=1e-4)
        torch._foreach_mul_(changes, 0.1)
        torch._foreach_mul_(z, 0.9)
        torch._foreach_add_(z, changes)
        torch._foreach_sub_(x, z)

    pairs, triples, singles = rows(x, y), rows(x, y, z), rows(x)
    means, at = rows(x, y, x), results.data_ptr()
    found: dict[str, tuple[Run, Run]] = {
        "reduce 2->1": (_bind(cuda.reduce, Sum, code, means, 2, 1.0, 0.5, stream=stream), torch_mean),
        "axpby": (_bind(cuda.axpby, code, pairs, 0.1, 0.9, stream=stream), torch_axpby),
        "flatten": (_bind(cuda.flatten, spans, flat.data_ptr(), stream=stream), lambda: _flatten_dense_tensors(x)),
        "unflatten": (_bind(cuda.unflatten, flat.data_ptr(), spans, stream=stream), torch_unflatten),
        "norm": (_bind(cuda.norms, code, singles, at, stream=stream), lambda: torch._foreach_norm(x, 2)),
        "unchanged": (
            _bind(cuda.unchanged, items, flat.data_ptr(), before.data_ptr(), at, stream=stream),
            torch_unchanged,
        ),
        "lars": (_bind(cuda.lars_step, code, triples, at, 1e-4, 0.9, False, stream=stream), torch_lars),
    }
    table = []
    for kernel, (ours, theirs) in found.items():
        if wanted(kernel):
            times = {
                name: one.summary() for name, one in device_race({"kernel": ours, "torch": theirs}, budget).items()
            }
            ratio = times["torch"]["median"] / times["kernel"]["median"]
            table.append({"kernel": kernel, "times": times, "ratio": ratio})
    return table


def targets(rows: Sequence[Results], resnet: Sequence[Results]) -> list[Results]:
    """The worst dtype of each kernel at each large size, and each call on ResNet-50's tensors."""
    entries = []
    for kernel, size in dict.fromkeys((row["kernel"], row["bytes"]) for row in rows if row["bytes"] >= LARGE):
        chosen = [row for row in rows if row["kernel"] == kernel and row["bytes"] == size]
        worst = min(chosen, key=lambda row: row["ratio"])
        what = f"{kernel}, {format_bytes(size)} (worst: {worst['dtype']}), bandwidth over the copy's"
        entries.append(verdicts.target(what, worst["ratio"], COPY_LIMIT, at_least=True))
    for row in resnet:
        what = f"{row['kernel']} of ResNet-50's tensors, time of PyTorch's operations over ours"
        entries.append(verdicts.target(what, row["ratio"], TORCH_LIMIT, at_least=True))
    return entries


def check_device(program: str = "gpu_kernels") -> None:
    """NotBuilt without a GPU that the kernels can run on."""
    if not build_info()["cuda"]:
        cuda_kernels.CudaKernels(0)  # says how to mend that
    if not torch.cuda.is_available():
        raise NotBuilt(f"the benchmark {program} needs an NVIDIA GPU, and a PyTorch that sees it (`sordino doctor`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark in this process. NotBuilt where there is no GPU."""
    options = command_line.parser("gpu_kernels", __doc__, 0.5, "kernel, dtype and size")
    options.add_argument("--sizes", default=SIZES, metavar="LIST", help=f"bytes a tensor (default {SIZES})")
    options.add_argument("--only", default="", metavar="WORD", help="only kernels whose name contains this")
    chosen = options.parse_args(argv)
    check_device()
    budget = 0.02 if chosen.quick else chosen.budget
    found_machine, watch = machines.machine(None), Watch(Participants())
    rows = []
    for text in chosen.sizes.split(","):
        size = command_line.parse_bytes(text)
        rows += measure(size, budget, lambda kernel: chosen.only in kernel)
        records.log(f"{format_bytes(size)} a tensor: done")
    resnet = measure_resnet(budget, lambda kernel: chosen.only in kernel)
    found_machine["others"] = watch.others()
    results: Results = {
        "benchmark": "gpu_kernels",
        "name": "gpu_kernels",
        "machine": found_machine,
        "device": torch.cuda.get_device_name(),
        "cuda": build_info()["cuda"],
        "rows": rows,
        "resnet": resnet,
        "targets": targets(rows, resnet),
    }
    records.publish(results, command_line.results_folder(chosen), REPORTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
