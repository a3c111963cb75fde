"""Report and plot of gpu_ranks."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_quartiles, format_seconds, table

_LABELS = {
    "arena": "all-reduce in place",
    "fresh": "all-reduce, ordinary tensor",
    "gossip": "gossip exchange",
    "by hand": "by hand, our all-reduce",
    "mpi": "by hand, MPI_Allreduce",
}
_ROUTES = {"default": "by the default route", "host": "through the host"}


def _cell(one: dict[str, Any] | None, peer: dict[str, Any]) -> str:
    if one is None:
        return "–"
    return f"{format_quartiles(one)}, {peer['median'] / one['median']:.2f}×"


def report(results: Results) -> str:
    """Return times, and ratios to the contestant by hand in the same world, as Markdown."""
    where = "one" if results["gpus"] == 1 else str(results["gpus"])
    what = (
        f"{results['ranks']} ranks on {where} {results['device']} ({results['cuda']}). Averages of float32, from the "
        "call until the GPU has finished; the slowest rank counts. By hand is a copy into pinned memory, an all-reduce "
        "of the host's memory and a copy back, interleaved with ours. Each time is followed by the time by hand over "
        "it (with our all-reduce, in the same world)."
    )
    blocks = verdicts.head(results, "Ranks that take turns on a GPU", what)
    slices = results["slices"]
    blocks.insert(
        2,
        "Ranks on one GPU use it in turn, by slices of time: a rank that waits for another rank's kernel also waits "
        "for its slice. So these times compare ways; they do not apply to ranks with their own GPUs. A copy of "
        f"{format_bytes(slices['bytes'])} without communication takes {format_seconds(slices['alone'])} while the "
        f"other ranks idle, and {format_seconds(slices['together'])} when all copy at once: {slices['ratio']:.2f} "
        "times as long.",
    )
    for route, label in _ROUTES.items():
        rows = [row for row in results["rows"] if route in row["routes"]]
        if not rows:
            continue
        keys = list(dict.fromkeys(key for row in rows for key in row["routes"][route]))
        lines = [
            [_LABELS[key], *(_cell(row["routes"][route].get(key), row["routes"][route]["by hand"]) for row in rows)]
            for key in keys
        ]
        ways = {
            key: "+".join(sorted({way for row in rows for way in row["routes"][route][key]["ways"]})) or "none"
            for key in keys
            if key in ("arena", "fresh", "gossip")
        }
        taken = ", ".join(f"{_LABELS[key]}: {way}" for key, way in ways.items())
        blocks += [
            f"## Ours {label}: median (quartiles), and speed over that by hand",
            table(["Contestant", *(format_bytes(row["bytes"]) for row in rows)], lines),
            f"Ways taken: {taken}.",
        ]
    return "\n\n".join(blocks)


def draw(results: Results, figure: Any) -> None:
    """Draw times by size, for both routes."""
    for axes, (route, label) in zip(figure.subplots(1, 2, sharey=True), _ROUTES.items(), strict=True):
        rows = [row for row in results["rows"] if route in row["routes"]]
        for key in dict.fromkeys(key for row in rows for key in row["routes"][route]):
            found = [row for row in rows if key in row["routes"][route]]
            axes.plot(
                [row["bytes"] for row in found],
                [row["routes"][route][key]["median"] for row in found],
                marker="o",
                ms=3,
                label=_LABELS[key],
            )
        axes.set(xlabel="bytes", xscale="log", yscale="log", title=f"ours {label}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.axes[0].set(ylabel="seconds")


REPORTS = {"gpu_ranks": Report(report, draw)}
