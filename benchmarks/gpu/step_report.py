"""Report and plot of gpu_step."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_quartiles, table

_CLOCKS = {"wall": "the host's clock", "device": "events"}


def _percent(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} % ({found['q1']:.2f} to {found['q3']:.2f})"


def _ranks(results: Results) -> str:
    if results["ranks"] == 1:
        return f"One rank on one {results['device']}, where nothing is averaged"
    averaged = f"{format_bytes(max(row['bytes'] for row in results['rows']))} of gradients are averaged in a step"
    ways = ", ".join(sorted({way for row in results["rows"] for way in row["ways"]}))
    shared = " They take turns on it, also with the bare optimizer." if results["gpus"] < results["ranks"] else ""
    return f"{results['ranks']} ranks on {results['gpus']} × {results['device']}; {averaged}, by {ways}.{shared} Setup"


def report(results: Results) -> str:
    """Return times of each kind of step, bare and wrapped, by both clocks, and the host's waits, as Markdown."""
    ranks = _ranks(results)
    what = (
        f"{ranks} ({results['cuda']}): a training step with SGD with momentum, and the same with DistributedOptimizer "
        f"around it, interleaved. ResNet-50 has {results['batch']} images in a step of a rank, bfloat16 autocast, "
        "channels_last. “parameters” makes its gradients without computation. The overhead is taken round by round."
    )
    blocks = verdicts.head(results, "A step on a GPU", what, unit="")
    lines = [
        [
            f"{row['case']}, set_to_none={row['set_to_none']}, {label}",
            format_quartiles(row["contestants"]["bare"][clock]),
            format_quartiles(row["contestants"]["sordino"][clock]),
            _percent(row["overhead"][clock]),
        ]
        for row in results["rows"]
        for clock, label in _CLOCKS.items()
    ]
    waits = [[name, *(f"{count:g}" for count in one.values())] for name, one in results["waits"].items()]
    heads = ["Step", *next(iter(results["waits"].values()))]
    return "\n\n".join(
        [
            *blocks,
            "## A step: median (and quartiles)",
            table(["Step", "Bare", "Wrapped", "Overhead"], lines),
            "## Waits of the host for the GPU in a step of ResNet-50, counted by PyTorch's profiler",
            "“one wait” is a single synchronization, which tests the profiler.",
            table(heads, waits),
        ]
    )


def draw(results: Results, figure: Any) -> None:
    """Draw the overhead of each kind of step."""
    axes = figure.subplots()
    rows = results["rows"]
    for offset, (clock, label) in enumerate(_CLOCKS.items()):
        places = [k + 0.4 * offset for k in range(len(rows))]
        axes.bar(places, [row["overhead"][clock]["median"] for row in rows], 0.35, label=label)
    axes.axhline(2.0, color="red", lw=0.8)
    axes.set_xticks([k + 0.2 for k in range(len(rows))])
    axes.set_xticklabels([f"{row['case']}\nset_to_none={row['set_to_none']}" for row in rows], fontsize=7)
    axes.set(ylabel="percent of the bare step")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()


REPORTS = {"gpu_step": Report(report, draw)}
