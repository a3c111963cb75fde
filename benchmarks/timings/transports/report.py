"""Tables and plots of launchers and transports."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_seconds, table

MOMENTS = ("entered", "torch", "sordino", "met", "stepped", "ended")
_HEADS = ("In the program", "torch imported", "Sordino imported", "Initialized", "First step", "All ended")
_LAUNCHERS = {
    "local": "`sordino run`",
    "mpi": "`sordino run --launcher mpi`",
    "torchrun": "torchrun",
    "alone": "no launcher, no communication",
}
_LABELS = {
    "sordino_ucx": "Sordino, UCX",
    "sordino_mpi": "Sordino, MPI",
    "sordino_local": "Sordino",
    "ordinary": "Sordino, ordinary memory",
    "floor": "Memory alone",
    "mpi": "MPI_Allreduce",
    "gloo": "Gloo",
}
_COLOURS = {
    "sordino_ucx": "#0b6e4f",
    "sordino_mpi": "#3d5a80",
    "sordino_local": "#0b6e4f",
    "ordinary": "#7fb069",
    "floor": "#222222",
    "mpi": "#c8553d",
    "gloo": "#aaaaaa",
}
_WAYS = {
    "local": "one machine, `sordino run`",
    "mpi": "one machine, mpirun",
    "hosts_ucx": "three hosts, UCX",
    "hosts_mpi": "three hosts, MPI",
}


def place_of(row: Results) -> str:
    """Describe the hosts and links of a row."""
    ranks = row["ranks_per_host"]
    if not row["hosts"]:
        return f"one machine, {ranks} ranks"
    links = f"{row['mbps']:g} Mbps" if row["mbps"] else "links as fast as the machine"
    return f"{row['hosts']} hosts, {ranks} rank{'s' if ranks > 1 else ''} each, {links}"


def _by_place(results: Results) -> dict[str, list[Results]]:
    found: dict[str, list[Results]] = {}
    for row in results["rows"]:
        found.setdefault(place_of(row), []).append(row)
    return found


def allreduce(results: Results) -> str:
    """Return times by size and place, and ratios to the first contestant, as Markdown."""
    what = (
        "In-place all-reduce of float32, with one contestant per job and jobs in turn. All compute the average, except "
        "MPI_Allreduce (by mpi4py), which computes the sum. Medians of the slowest rank's times over all jobs; in "
        "brackets the medians of the fastest and the slowest job. The limit between hosts is the link's rate."
    )
    blocks = verdicts.head(results, "All-reduce by MPI, UCX and Gloo", what, labels=_LABELS)
    for place, rows in _by_place(results).items():
        names = list(rows[0]["contestants"])
        ours = names[0]
        others = names[1:]
        lines = []
        for row in rows:
            entries = row["contestants"]
            cells = [
                f"{format_seconds(entries[name]['median'])} "
                f"({format_seconds(min(entries[name]['turns']))} – {format_seconds(max(entries[name]['turns']))})"
                for name in names
            ]
            cells.append("–" if row["limit"] is None else format_seconds(row["limit"]))
            cells += [f"{entries[name]['median'] / entries[ours]['median']:.2f}×" for name in others]
            lines.append([format_bytes(row["bytes"]), *cells])
        heads = ["Bytes", *[_LABELS[name] for name in names], "Limit"]
        heads += [f"{_LABELS[name]} / {_LABELS[ours]}" for name in others]
        blocks += [f"## {place[0].upper()}{place[1:]}", table(heads, lines)]
    return "\n\n".join(blocks)


def draw_allreduce(results: Results, figure: Any) -> None:
    """Draw bytes per second by size, one panel per place."""
    places = _by_place(results)
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for axes, (place, rows) in zip(panels, places.items(), strict=True):
        sizes = [row["bytes"] for row in rows]
        for name in rows[0]["contestants"]:
            speeds = [row["bytes"] / row["contestants"][name]["median"] / 1e6 for row in rows]
            axes.loglog(sizes, speeds, marker="o", ms=3, color=_COLOURS[name], label=_LABELS[name])
        if rows[0]["limit"] is not None:
            limits = [row["bytes"] / row["limit"] / 1e6 for row in rows]
            axes.loglog(sizes, limits, "k--", lw=0.8, label="the link's limit")
        axes.set_title(place, fontsize=6)
        axes.tick_params(labelsize=6)
        axes.set_xlabel("bytes", fontsize=7)
        axes.legend(fontsize=5)
    panels[0].set_ylabel("MB of tensor a second", fontsize=7)


def start(results: Results) -> str:
    """Return the times of a start by launcher as Markdown."""
    what = (
        f"Times from the launcher's start until the last of {results['ranks']} ranks reached each point. Medians, and "
        "the quartiles of the first step. `sordino run` starts the ranks itself; with `--launcher mpi`, mpirun does."
    )
    lines = []
    for name, found in results["contestants"].items():
        cells = [format_seconds(found[moment]["median"]) if moment in found else "–" for moment in MOMENTS]
        step = found["stepped"]
        lines.append([_LAUNCHERS[name], *cells, f"{format_seconds(step['q1'])} – {format_seconds(step['q3'])}"])
    heads = ["", *_HEADS, "First step, quartiles"]
    return "\n\n".join([*verdicts.head(results, "From the command to the first step", what), table(heads, lines)])


def draw_start(results: Results, figure: Any) -> None:
    """Draw the parts of a start by launcher."""
    axes = figure.subplots()
    names = list(results["contestants"])
    before = dict.fromkeys(names, 0.0)
    for moment, head in zip(MOMENTS, _HEADS, strict=True):
        reached = [results["contestants"][name].get(moment, {"median": before[name]})["median"] for name in names]
        widths = [at - before[name] for at, name in zip(reached, names, strict=True)]
        axes.barh(names, widths, left=list(before.values()), label=head)
        before = dict(zip(names, reached, strict=True))
    axes.set_xlabel("seconds")
    axes.legend(fontsize=7)


def loss(results: Results) -> str:
    """Return the seconds until the error in surviving ranks as Markdown."""
    what = (
        f"Three ranks average 64 KiB repeatedly; rank 1 is killed with SIGKILL. Seconds until `PeerLost` is raised in "
        f"each of the two other ranks. Hosts are emulated, with links of {results['mbps']} Mbps."
    )
    lines = [
        [_WAYS[name], *[format_seconds(found[key]) for key in ("median", "q1", "q3", "most")], str(found["count"])]
        for name, found in results["contestants"].items()
    ]
    heads = ["", "Median", "Lower quartile", "Upper quartile", "Longest", "Number"]
    return "\n\n".join([*verdicts.head(results, "From kill -9 to the survivors' error", what), table(heads, lines)])


def draw_loss(results: Results, figure: Any) -> None:
    """Draw the medians and the longest times."""
    axes = figure.subplots()
    found = results["contestants"]
    names = list(found)
    axes.barh([_WAYS[name] for name in names], [1e3 * found[name]["median"] for name in names], color="#3d5a80")
    axes.scatter([1e3 * found[name]["most"] for name in names], range(len(names)), color="#c8553d", label="longest")
    axes.set_xlabel("ms")
    axes.legend(fontsize=7)


REPORTS = {
    "transports_allreduce": Report(allreduce, draw_allreduce),
    "transports_start": Report(start, draw_start),
    "transports_loss": Report(loss, draw_loss),
}
