"""Tables and plot of the Layered SGD benchmark."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

WORKERS_ON_A_NODE = 4  # as in the source
SHARES = (0.0, 0.25, 0.5, 1.0)  # of a step that are loading
_SETS = {"resnet20": "ResNet-20", "resnet50": "ResNet-50"}
_COLOURS = {"AllReduce": "#c8553d", "Layered thread": "#3d5a80", "Layered rank": "#0b6e4f", "Horovod": "#888888"}


def hidden(row: Results, name: str, load: str) -> float:
    """What part of AllReduce's communication a step with so much to load does not wait for."""
    exposed = row["contestants"][name]["exposed"][load]["median"]
    reference = row["contestants"].get("AllReduce", row["contestants"][name])
    return float(1 - exposed / reference["exposed"]["0"]["median"])


def efficiency(row: Results, name: str, load: str) -> float:
    """Seconds of loading over seconds of the step, where nothing else is done."""
    loading = float(load) * row["whole"]
    return float(loading / (loading + row["contestants"][name]["exposed"][load]["median"]))


def where(row: Results) -> str:
    """The job, in words."""
    place = "one machine" if row["place"] == "here" else f"{row['hosts']} hosts"
    return f"{row['set']}, {row['workers']} workers on {place}, {row['mode']}"


def _label(name: str, row: Results) -> str:
    return f"{name} {row['mode']}" if name == "Layered" else name


def report(results: Results) -> str:
    """Exposed communication, hidden parts and efficiency; then predicted scaling."""
    what = (
        "What a step waits for communication (exposed), when nothing is computed and a batch is loaded after it for 0, "
        "½, 1 and 2 times what AllReduce takes with nothing to load (Horovod: what itself takes). Loading is sleep. A "
        "group is a host; communicators are the groups' first workers' threads, or a rank more on each host, which "
        "needs cores too. Hidden: what part of AllReduce's time is not waited for. Efficiency: loading over the whole "
        f"step. Hosts are emulated, with links of {results['mbps']:g} Mbps each way. Medians of the slowest rank's "
        "times."
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
    if results["scaling"]:
        blocks += ["## Scaling by the cost model", _scaling(results)]
    return "\n\n".join(blocks)


def _scaling(results: Results) -> str:
    source = results["source"]
    text = (
        f"ResNet-50, {WORKERS_ON_A_NODE} workers a node, links as measured above. What a step takes without "
        "communication is chosen so that AllReduce is as efficient at 256 workers as the source's "
        f"({source['AllReduce']:.1%}); nothing hides but behind loading, which is a share of that time. The source "
        f"(Figure 6) has Layered at {source['Layered']:.1%}."
    )
    keys = ["AllReduce", *(f"Layered {share:g}" for share in SHARES)]
    heads = ["Workers", "AllReduce", *(f"Layered, loading {share:.0%}" for share in SHARES)]
    lines = [[str(row["workers"]), *(f"{row[key]:.1%}" for key in keys)] for row in results["scaling"]]
    lines.append(["256, source", f"{source['AllReduce']:.1%}", f"{source['Layered']:.1%}", *[""] * (len(SHARES) - 1)])
    return f"{text}\n\n{table(heads, lines)}"


def draw(results: Results, figure: Any) -> None:
    """Exposed communication against loading, a panel for each place; then scaling."""
    places = list(
        dict.fromkeys((row["set"], row["place"], row.get("hosts"), row["workers"]) for row in results["rows"])
    )
    columns = len(places) // 2 + 1
    figure.set_size_inches(11, 8)
    panels = figure.subplots(2, columns, squeeze=False).flatten()
    for axes in panels[len(places) + 1 :]:
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
    if results["scaling"]:
        counts, last = [row["workers"] for row in results["scaling"]], panels[len(places)]
        for key in ("AllReduce", *(f"Layered {share:g}" for share in SHARES)):
            last.plot(counts, [row[key] for row in results["scaling"]], "o-", label=key)
        last.set_xscale("log", base=2)
        last.set_title("scaling efficiency, predicted")
        last.set_xlabel("workers")
        last.legend(fontsize="small", title="loading's share")


REPORTS = {"layered": Report(report, draw)}
