"""The report and the plot of gpu_step."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_CLOCKS = {"wall": "the host's clock", "device": "events"}


def _spread(times: dict[str, float]) -> str:
    return f"{format_seconds(times['median'])} ({format_seconds(times['q1'])} to {format_seconds(times['q3'])})"


def _percent(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} % ({found['q1']:.2f} to {found['q3']:.2f})"


def report(results: Results) -> str:
    """Every kind of step, bare and wrapped, by both clocks."""
    what = (
        f"On one {results['device']} ({results['cuda']}), one rank: a training step with SGD with momentum, and the "
        f"same with DistributedOptimizer around it, interleaved. ResNet-50 has {results['batch']} images in a step, "
        "bfloat16 autocast, channels_last; “parameters” has its gradients made and nothing computed. The overhead is "
        "taken round by round."
    )
    blocks = verdicts.head(results, "A step on one GPU", what, unit=" %")
    lines = [
        [
            f"{row['case']}, set_to_none={row['set_to_none']}, {label}",
            _spread(row["contestants"]["bare"][clock]),
            _spread(row["contestants"]["sordino"][clock]),
            _percent(row["overhead"][clock]),
        ]
        for row in results["rows"]
        for clock, label in _CLOCKS.items()
    ]
    title = "## A step: median (and quartiles)"
    return "\n\n".join([*blocks, title, table(["Step", "Bare", "Wrapped", "Overhead"], lines)])


def draw(results: Results, figure: Any) -> None:
    """The overhead of each kind of step."""
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
