"""Reports on collectives as Markdown, and as text in the format of the OSU micro-benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sordino.bench.contestants.rows import OURS, PEERS, bimodal, ratio_to_best
from sordino.report import Results, verdicts
from sordino.report.tables import format_bytes, table

_LEGEND = (
    "Float32; reductions are sums. The size is that of the tensor that a rank passes in. So an allgather's result has "
    "the size times the number of ranks. Each contestant runs alone in its own jobs, started by its own launcher; jobs "
    "take turns. A block begins with a barrier in shared memory, and the time of the slowest rank counts. Up to 16 KiB "
    "a block is a loop of 100 calls, whose time is divided by 100; above, and for broadcasts, it is one call. Times "
    "are the median over jobs of each job's median. The memory traffic alone is that of private memory, without "
    "communication. The time of sendrecv is that of a message to a rank and one back."
)
_WIDTH = 18  # of a column in the format of the OSU micro-benchmarks


def _size(row: Results) -> str:
    return format_bytes(row["bytes"]) if row["bytes"] else "–"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g}" if seconds < 999.5e-6 else f"{seconds * 1e6:.0f}"


def _place(results: Results) -> str:
    if "hosts" not in results:
        return "one machine"
    rate = f"links of {results['mbps']:g} Mbps" if results["mbps"] else "links as fast as the machine"
    return f"{results['hosts']} emulated hosts with {rate}"


def _measured(rows: Sequence[Results], labels: Mapping[str, str]) -> list[str]:
    return [name for name in labels if any(name in row["contestants"] for row in rows)]


def _ratio(row: Results, ours: str, labels: Mapping[str, str]) -> str:
    found = ratio_to_best(row, ours)
    return "–" if found is None else f"{found[0]:.2f}× ({labels[found[1]]})"


def markdown(results: Results) -> str:
    """Return the targets, and for each operation the times, the ratios to the best peer and the spread of jobs."""
    labels, rows = results["labels"], results["rows"]
    what = f"Collectives of {results['ranks']} ranks on {_place(results)}. "
    what += f"Jobs per contestant: {results['jobs']}. {_LEGEND}"
    blocks = verdicts.head(results, "Collectives", what)
    blocks += [f"Left out: {'; '.join(results['left_out'])}."] if results["left_out"] else []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        blocks += _operation([row for row in rows if row["operation"] == operation], labels)
    found = [f"- {line}" for line in bimodal_lines(results)]
    blocks += ["## Jobs whose medians differ by more than 1.5 times", "\n".join(found) or "None."]
    return "\n\n".join(blocks)


def bimodal_lines(results: Results) -> list[str]:
    """Return a line with the job medians of each row and contestant whose job medians differ by more than 1.5 times."""
    return [
        f"{row['operation']} {_size(row)}, {results['labels'][name]}: "
        f"{', '.join(_us(job) for job in sorted(row['contestants'][name]['jobs']))} µs"
        for row, name in bimodal(results["rows"])
    ]


def _operation(rows: Sequence[Results], labels: Mapping[str, str]) -> list[str]:
    names = _measured(rows, labels)
    ours = [name for name in OURS if name in names]
    compared = ours if any(name in names for name in PEERS) else []
    times, spreads = [], []
    for row in rows:
        entries = row["contestants"]
        cells = [_us(entries[name]["median"]) if name in entries else "–" for name in names]
        times.append([_size(row), *cells, *[_ratio(row, name, labels) for name in compared]])
        parts = ("least", "q1", "q3", "most")
        cells = [" / ".join(_us(entries[name][part]) for part in parts) if name in entries else "–" for name in names]
        spreads.append([_size(row), *cells])
    columns = ["Size", *[labels[name] for name in names]]
    return [
        f"## {rows[0]['operation']}",
        "Times in µs, and the time of the fastest peer over that of Sordino (more is better for Sordino):",
        table([*columns, *[f"Best peer / {labels[name]}" for name in compared]], times),
        "Spread of the job medians in µs: least / lower quartile / upper quartile / most:",
        table(columns, spreads),
    ]


def osu(results: Results, name: str) -> str:
    """Return the times of one contestant as the OSU micro-benchmarks print them.

    A time is a rank's mean over the calls. Columns have the average, the least and the most of all ranks.
    """
    blocks = []
    for operation in dict.fromkeys(row["operation"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["operation"] == operation and name in row["contestants"]]
        if not rows:
            continue
        columns = ["Avg Latency(us)", "Min Latency(us)", "Max Latency(us)", "Iterations"]
        sized = operation != "barrier"
        first = ["# Size".ljust(10)] if sized else ["# "]
        lines = [f"# OSU MPI {operation.capitalize()} Latency Test (format; measured: {results['labels'][name]})"]
        lines.append("".join([*first, *[column.rjust(_WIDTH) for column in columns]]))
        for row in rows:
            entry = row["contestants"][name]
            times = [f"{entry[part] * 1e6:.2f}" for part in ("average", "fastest", "slowest")]
            size = str(row["bytes"]).ljust(10) if sized else "  "
            lines.append("".join([size, *[text.rjust(_WIDTH) for text in (*times, str(entry["calls"]))]]))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
