"""Tables and plot of the Layered SGD benchmark."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_SETS = {"resnet20": "ResNet-20", "resnet50": "ResNet-50"}
_COLOURS = {"AllReduce": "#c8553d", "Layered thread": "#3d5a80", "Layered rank": "#0b6e4f", "Horovod": "#888888"}


def hidden(row: Results, name: str, load: str) -> float:
    """Return the share of AllReduce's communication time that is hidden in a step with this load."""
    exposed = row["contestants"][name]["exposed"][load]["median"]
    reference = row["contestants"].get("AllReduce", row["contestants"][name])
    return float(1 - exposed / reference["exposed"]["0"]["median"])


def efficiency(row: Results, name: str, load: str) -> float:
    """Return the seconds of loading over the seconds of the step, which has no computation."""
    loading = float(load) * row["whole"]
    return float(loading / (loading + row["contestants"][name]["exposed"][load]["median"]))


def where(row: Results) -> str:
    """Describe a row's job."""
    place = "one machine" if row["place"] == "here" else f"{row['hosts']} hosts"
    return f"{row['set']}, {row['workers']} workers on {place}, {row['mode']}"


def _label(name: str, row: Results) -> str:
    return f"{name} {row['mode']}" if name == "Layered" else name


def report(results: Results) -> str:
    """Return exposed communication, hidden parts and efficiency as Markdown."""
    what = (
        "Exposed: the time that a step waits for communication, without computation. After the step a batch is loaded "
        "for 0, ½, 1 and 2 times the time of AllReduce without loading (Horovod: its own time). Loading is a sleep. A "
        "group is a host. Communicators are threads of the groups' first workers, or one more rank on each host, which "
        "needs cores too. Hidden: the share of AllReduce's time that is not waited for. Efficiency: loading over the "
        f"whole step. Hosts are emulated, with links of {results['mbps']:g} Mbps each way. Medians of the slowest "
        "rank's times."
    )
    blocks = verdicts.head(results, "Layered SGD", what)
    for name in dict.fromkeys(row["set"] for row in results["rows"]):
        lines = []
        for row in results["rows"]:
            if row["set"] != name:
                continue
            for contestant, one in row["contestants"].items():
                exposed = [format_seconds(entry["median"]) for entry in one["exposed"].values()]
                parts = [f"{hidden(row, contestant, load):.0%}" for load in ("0.5", "1", "2")]
                steps = [f"{efficiency(row, contestant, load):.0%}" for load in ("1", "2")]
                place = where(row).partition(", ")[2]
                lines.append([f"{place}: {contestant}", *exposed, *parts, *steps])
        loads = ["Exposed, load 0", "½", "1", "2"]
        heads = ["", *loads, "Hidden, load ½", "1", "2", "Efficiency, load 1", "2"]
        blocks += [f"## {_SETS[name]}", table(heads, lines)]
    return "\n\n".join(blocks)


def draw(results: Results, figure: Any) -> None:
    """Draw exposed communication against loading, one panel per place."""
    places = list(
        dict.fromkeys((row["set"], row["place"], row.get("hosts"), row["workers"]) for row in results["rows"])
    )
    columns = (len(places) + 1) // 2
    figure.set_size_inches(11, 8)
    panels = figure.subplots(2, columns, squeeze=False).flatten()
    for axes in panels[len(places) :]:
        axes.remove()
    for axes, chosen in zip(panels, places):
        name, place, hosts, _ = chosen
        seen = set()
        for row in results["rows"]:
            if (row["set"], row["place"], row.get("hosts"), row["workers"]) != chosen:
                continue
            for contestant, one in row["contestants"].items():
                label = _label(contestant, row)
                if label in seen:
                    continue
                seen.add(label)
                loads = [float(load) for load in one["exposed"]]
                values = [1e3 * entry["median"] for entry in one["exposed"].values()]
                axes.plot(loads, values, "o-", color=_COLOURS[label], label=label)
        axes.set_title(f"{_SETS[name]}, " + ("one machine" if place == "here" else f"{hosts} hosts"))
        axes.set_xlabel("loading, in all-reduces")
        axes.set_ylabel("exposed, ms a step")
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize="small")


REPORTS = {"layered": Report(report, draw)}
