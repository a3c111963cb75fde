"""Table and plot of writing memory that another process has read."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, table

_PLACES = {"near": "share a cache", "far": "share no cache"}


def _found(results: Results) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """Return the rows of both kinds of stores by place, bytes and ring."""
    found: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for row in results["rows"]:
        found.setdefault((row["place"], row["ring"], row["bytes"]), {})[row["stores"]] = row
    return found


def markdown(results: Results) -> str:
    """Return the times of both kinds of stores as Markdown."""
    lines = []
    for (place, ring, size), by_stores in sorted(_found(results).items(), reverse=True):
        times = [
            f"{by_stores[stores]['write'] * 1e6:.1f} + {by_stores[stores]['read'] * 1e6:.1f}"
            if stores in by_stores
            else ""
            for stores in ("ordinary", "streaming")
        ]
        lines.append([_PLACES[place], format_bytes(ring), format_bytes(size), *times])
    what = (
        "Two processes exchange messages through slots in shared memory, which form a ring. Microseconds of writing "
        "one's own message, and of reading the other's."
    )
    heads = ["the two cores", "ring", "message", "ordinary stores", "streaming stores"]
    return "\n\n".join([*verdicts.opening(results, "Cache lines that a peer has read", what), table(heads, lines)])


def draw(results: Results, figure: Any) -> None:
    """Draw the time per byte of messages in the smallest and largest ring, by their size."""
    panels = figure.subplots(1, 2, sharey=True)
    rings = sorted({row["ring"] for row in results["rows"]})
    for axes, place in zip(panels, _PLACES):
        for ring, line in ((rings[0], "-"), (rings[-1], "--")):
            for stores in ("ordinary", "streaming"):
                rows = [
                    row
                    for row in results["rows"]
                    if (row["place"], row["ring"], row["stores"]) == (place, ring, stores)
                ]
                rows.sort(key=lambda row: row["bytes"])
                times = [(row["write"] + row["read"]) / row["bytes"] * 1e9 for row in rows]
                label = f"{stores}, ring of {format_bytes(ring)}"
                axes.plot([row["bytes"] for row in rows], times, line, marker="o", label=label)
        axes.set(xscale="log", xlabel="bytes", title=f"cores that {_PLACES[place]}")
    panels[0].set_ylabel("ns per byte, written and read")
    panels[0].legend()


REPORTS = {"cache_lines": Report(markdown, draw)}
