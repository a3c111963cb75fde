"""Table and plot of single copies by the kernel."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_quartiles, table


def markdown(results: Results) -> str:
    """Return the times of both methods as Markdown."""
    rows = []
    for row in results["rows"]:
        kernel, slots = (row["contestants"][name] for name in ("kernel", "slots"))
        ratio = f"{kernel['median'] / slots['median']:.2f}"
        rows.append([format_bytes(row["bytes"]), format_quartiles(kernel), format_quartiles(slots), ratio])
    what = (
        "A tensor of another process is brought into this one. A ratio above 1 means that the kernel's copy is slower."
    )
    heads = ["size", "process_vm_readv", "two copies through shared memory", "ratio"]
    return "\n\n".join([*verdicts.opening(results, "Single copies by the kernel", what), table(heads, rows)])


def draw(results: Results, figure: Any) -> None:
    """Draw the rates of both methods by size."""
    axes = figure.subplots()
    sizes = [row["bytes"] for row in results["rows"]]
    for name, label in (("kernel", "process_vm_readv"), ("slots", "two copies through shared memory")):
        rates = [row["bytes"] / row["contestants"][name]["median"] / 1e9 for row in results["rows"]]
        axes.plot(sizes, rates, marker="o", label=label)
    axes.set(xscale="log", xlabel="bytes", ylabel="GB/s", title="A tensor from another process")
    axes.legend()


REPORTS = {"single_copy": Report(markdown, draw)}
