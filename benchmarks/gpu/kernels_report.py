"""Report and plot of gpu_kernels."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_quartiles, table

_COPY_LIMIT = 0.9


def report(results: Results) -> str:
    """Return bandwidths over that of a copy, and PyTorch's times over ours, as Markdown."""
    what = (
        f"On one {results['device']} ({results['cuda']}). Bandwidth of each kernel over that of a copy within device "
        "memory with the same total of bytes read and written, interleaved in one run: 1 is as fast as copying. Values "
        f"are random. The calls rotate through buffers, so that twice the cache's {format_bytes(results['cache'])} are "
        "touched before a buffer is used again. Medians of times between events on the device."
    )
    blocks = verdicts.head(results, "Kernels on the GPU", what)
    kinds = list(dict.fromkeys(row["kernel"] for row in results["rows"]))
    sizes = list(dict.fromkeys(row["bytes"] for row in results["rows"]))
    cells = {(row["kernel"], row["dtype"], row["bytes"]): row for row in results["rows"]}
    lines = []
    for kernel in kinds:
        for dtype in dict.fromkeys(row["dtype"] for row in results["rows"] if row["kernel"] == kernel):
            found = [cells.get((kernel, dtype, size)) for size in sizes]
            lines.append(
                [
                    f"{kernel}, {dtype}",
                    *(f"{one['ratio']:.2f} ({one['gbps']:.0f} GB/s)" if one else "–" for one in found),
                ]
            )
    blocks += [
        "## Bandwidth / copy",
        table(["Kernel", *(f"{format_bytes(size)} a tensor" for size in sizes)], lines),
    ]
    calls = [
        [
            row["kernel"],
            *(format_quartiles(row["times"][name]) for name in ("kernel", "copy", "torch")),
            f"{row['copy_ratio']:.2f}",
            f"{row['ratio']:.2f}×",
        ]
        for row in results["resnet"]
    ]
    title = "## One call on ResNet-50's 161 tensors: median (and quartiles)"
    heads = ["Kernel", "Ours", "A copy", "PyTorch's operations", "Bandwidth / copy", "Faster than PyTorch's"]
    return "\n\n".join([*blocks, title, table(heads, calls)])


def draw(results: Results, figure: Any) -> None:
    """Draw the bandwidth of every kernel over that of a copy, by size."""
    axes = figure.subplots()
    for kernel, dtype in dict.fromkeys((row["kernel"], row["dtype"]) for row in results["rows"]):
        rows = [row for row in results["rows"] if (row["kernel"], row["dtype"]) == (kernel, dtype)]
        line = "--" if dtype == "bfloat16" else "-"
        axes.plot(
            [row["bytes"] for row in rows],
            [row["ratio"] for row in rows],
            line,
            marker="o",
            ms=3,
            label=f"{kernel}, {dtype}",
        )
    axes.axhline(_COPY_LIMIT, color="red", lw=0.8)
    axes.set(xlabel="bytes a tensor", ylabel="bandwidth / copy", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, ncols=2)


REPORTS = {"gpu_kernels": Report(report, draw)}
