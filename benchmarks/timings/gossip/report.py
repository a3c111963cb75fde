"""Tables and plots of the two parts of the gossip benchmark."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_EXCHANGES = {
    "crossover_blocks": "Crossover, by blocks",
    "crossover_model": "Crossover, by model",
    "hierarchical": "Crossover, groups of 2",
    "push-sum": "PushSum",
    "dpsgd": "D-PSGD",
    "allreduce": "our all-reduce",
    "horovod": "Horovod's all-reduce",
    "floor": "floor",
    "three_passes": "three passes",
}
_COLOURS = {
    "crossover": "#0b6e4f",
    "crossover_blocks": "#0b6e4f",
    "crossover_model": "#5fb49c",
    "hierarchical": "#3d5a80",
    "push-sum": "#c8553d",
    "dpsgd": "#e0a458",
    "allreduce": "#555555",
    "horovod": "#8d6a9f",
    "floor": "#bbbbbb",
    "three_passes": "#dddddd",
    "combo": "#e0a458",
}


# ---- one exchange --------------------------------------------------------------------------------------------------


def exchange(results: Results) -> str:
    """Return the times of all contestants, and ratios to all-reduces and the floor, as Markdown."""
    ranks = results["ranks"]
    note = "" if "hierarchical" in results["contestants"] else " Groups of 2 need more ranks, and an even number."
    what = (
        f"One exchange of {results['parameters'] / 1e6:.1f} M float32 parameters (ResNet-50's) by {ranks} ranks on "
        f"{results['nodes']} node(s). Medians of the slowest rank's times; contestants are interleaved in one run, and "
        "Horovod is initialized only for its turns. Results are checked. The floor is the time of all ranks at once to "
        "read and write as many bytes in private memory. Three passes read a second array as well, as a rank must that "
        f"mixes without the help of other ranks.{note}"
    )
    rows = []
    for name, label in _EXCHANGES.items():
        if name not in results["contestants"]:
            continue
        one = results["contestants"][name]
        ratios = [verdicts.ratio(results, name, other) for other in ("floor", "three_passes", "allreduce", "horovod")]
        spread = f"{format_seconds(one['q1'])} … {format_seconds(one['q3'])}"
        cells = ["–" if value is None else f"{value:.2f}×" for value in ratios]
        rows.append([label, format_seconds(one["median"]), spread, *cells])
    heads = ["", "Median", "Quartiles", "/ floor", "/ three passes", "/ our all-reduce", "/ Horovod's"]
    blocks = verdicts.head(results, f"One exchange, {ranks} ranks", what, "×", _EXCHANGES)
    return "\n\n".join([*blocks, "## Times, and as multiples (less is better)", table(heads, rows)])


def draw_exchange(results: Results, figure: Any) -> None:
    """Draw a bar for every contestant."""
    axes = figure.subplots()
    names = [name for name in _EXCHANGES if name in results["contestants"]]
    found = [results["contestants"][name] for name in names]
    middle = [one["median"] * 1e3 for one in found]
    low, high = ([abs(one[part] - one["median"]) * 1e3 for one in found] for part in ("q1", "q3"))
    labels = [_EXCHANGES[name].replace(", ", ",\n").replace(" all", "\nall") for name in names]
    bars = axes.bar(labels, middle, yerr=[low, high], color=[_COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="%.1f", fontsize=8)
    title = f"One exchange of {results['parameters'] / 1e6:.1f} M parameters, {results['ranks']} ranks"
    axes.set(ylabel="ms", title=title)
    axes.tick_params(axis="x", labelsize=8)


# ---- finding peers -------------------------------------------------------------------------------------------------


def _source(row: Results) -> list[str]:
    source = row["source"]
    chance = f"{row['dead_end_probability']:.2%}" if "dead_end_probability" in row else "–"
    if "over" in source:
        return [f"over {format_seconds(source['over'])}", "not measured", "not measured", chance]
    ratio = source["median"] / row["ours"]["median"]
    return [format_seconds(source["median"]), f"{ratio:,.0f}×", f"{source['dead_ends']} of {source['draws']}", chance]


def topology(results: Results) -> str:
    """Return times to find peers by number of workers, and copies that the busiest worker sends, as Markdown."""
    step = results["step_ms"]
    what = (
        f"Time of one worker to find its peers for {results['segments']} segments in a step. Ours: destinations and "
        "sources, called from Python one by one, including the calls. The source's: its Algorithm 2 as written, in "
        "numpy, destinations only. A dead end is a draw whose last worker finds only itself; its probability is "
        "computed by recursion. Nothing is extrapolated: a step that took too long was stopped."
    )
    rows = []
    for row in results["rows"]:
        ours = row["ours"]["median"]
        cells = [format_seconds(ours), f"{1e5 * ours / step:.3f} %", *_source(row)]
        rows.append([str(row["workers"]), *cells])
    share = f"Ours / {step:g} ms"
    heads = ["Workers", "Ours", share, "Algorithm 2", "Algorithm 2 / ours", "Dead ends", "Probability"]
    loads = []
    for one in results["load"]:
        label = {"crossover": "Crossover", "combo": "COMBO"}[one["algorithm"]]
        parts = ("mean", "segment_busiest", "segment_worst", "model_busiest", "model_worst")
        loads.append([f"{label}, {one['workers']} workers", *[f"{one[part]:.2f}" for part in parts]])
    load_heads = ["", "Mean", "Segment: busiest", "Segment: worst", "Model: busiest", "Model: worst"]
    load = (
        "Copies that a worker sends in a round: the mean; and of the busiest worker the mean and the maximum over the "
        f"rounds, for one segment, and for all {results['segments']} segments together in copies of the model."
    )
    blocks = [*verdicts.head(results, "Finding peers", what, ""), "## Time a step", table(heads, rows)]
    return "\n\n".join([*blocks, "## Load", load, table(load_heads, loads)])


def draw_topology(results: Results, figure: Any) -> None:
    """Draw time by number of workers, and the busiest worker's copies."""
    left, right = figure.subplots(1, 2)
    rows = results["rows"]
    measured = [row for row in rows if "over" not in row["source"]]
    ours = [row["ours"]["median"] * 1e3 for row in rows]
    left.plot([row["workers"] for row in rows], ours, "-o", color=_COLOURS["crossover"], label="ours")
    times = [row["source"]["median"] * 1e3 for row in measured]
    left.plot([row["workers"] for row in measured], times, "-o", color=_COLOURS["push-sum"], label="Algorithm 2")
    left.axhline(results["step_ms"], color="black", lw=0.8, ls="--", label=f"a step of {results['step_ms']:g} ms")
    left.set(xscale="log", yscale="log", xlabel="workers", ylabel="ms a step", title="Finding peers, on one worker")
    for name, label, shift in (("crossover", "Crossover", -0.2), ("combo", "COMBO", 0.2)):
        found = [one for one in results["load"] if one["algorithm"] == name]
        places = [place + shift for place in range(len(found))]
        bars = right.bar(places, [one["segment_busiest"] for one in found], 0.38, color=_COLOURS[name], label=label)
        right.bar_label(bars, fmt="%.1f", fontsize=8)
        right.set_xticks(range(len(found)), [f"{one['workers']} workers" for one in found])
    right.set(ylabel="copies", title="Copies of a segment that the busiest worker sends")
    for axes in (left, right):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)


REPORTS = {
    "gossip_exchange": Report(exchange, draw_exchange),
    "gossip_topology": Report(topology, draw_topology),
}
