"""Table and plot of a plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.plan.predictions import CLOSE
from sordino.report import Results, machines
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_COLOURS = {"inside": "#0b6e4f", "across": "#3d5a80", "predicted": "#5fb49c", "measured": "#0b6e4f", "ideal": "#aaaaaa"}
_RULE = (
    "This is the rule of Lee et al., a starting point: in our trials it chose so large a number that accuracy suffered "
    "(claims, Local SGD, Section III-C). Compare accuracies before you rely on it."
)
_TAKEN = (
    "The recommendation is the fastest algorithm that uses gradients and parameters in the step that made them (not "
    "double_buffering, overlap, ScheduledPull, ADPSGD), and that has no more local models than the limit above. One "
    f"with a codec must be more than {CLOSE - 1:.0%} faster than all without. It is AllReduce if no such algorithm is "
    f"more than {CLOSE - 1:.0%} faster."
)
_PLACES = {"inside": "within a node", "across": "between nodes"}


def _rate(seconds: float) -> str:
    return f"{1e-9 / seconds:.3g} GB/s" if seconds > 0 else "–"


def markdown(results: Results) -> str:
    """Return the plan as Markdown: costs of links, times of algorithms, number of local models, recommendation."""
    rates = results["rates"]
    lines = [
        [
            _PLACES[place],
            format_seconds(rates[place]["alpha"]),
            f"{rates[place]['beta']:.3g}",
            _rate(rates[place]["beta"]),
        ]
        for place in _PLACES
        if rates[place] is not None
    ]
    what = (
        f"{results['ranks']} ranks on {results['nodes']} node(s), {results['parameters'] / 1e6:.3g} M parameters of "
        f"float32, {results['compute_ms']:g} ms of computation per step, {results['samples']} samples per epoch, "
        f"{results['batch']} per step and worker."
    )
    steps = {
        "the agreement that an operation can start": rates["agreement"],
        "a hop from one rank of a ring to the next": rates["hop"],
        "the software for a gradient tensor": rates["handling"],
    }
    others = ", ".join(f"{step} {format_seconds(seconds)}" for step, seconds in steps.items() if seconds > 0)
    costs = (
        "A message takes α seconds, and β seconds for each byte that passes the busiest node's link in one direction, "
        "or that a rank reads and writes within a node." + (f" Other costs: {others}." if others else "")
    )
    rows = [
        [
            row["name"],
            format_seconds(row["communication"]),
            "–" if row["measured"] is None else format_seconds(row["measured"]),
            "–" if row["error"] is None else f"{row['error']:+.0%}",
            f"{row['sent'] / 1e6:.3g} MB",
            format_seconds(row["step"]),
            format_seconds(row["epoch"]),
        ]
        for row in results["rows"]
    ]
    heads = ["Algorithm", "Communication per step", "Measured", "Error", "Sent to other nodes", "Step", "Epoch"]
    blocks = [
        "# Plan",
        what,
        _where(results),
        costs,
        table(["", "α", "β, s per byte", "1/β"], lines),
        table(heads, rows),
        "Communication is predicted. Step and epoch follow from the measurement, or from the prediction if the "
        "algorithm was not run, minus the part that computing can hide. "
        + " ".join([reliability(results["rows"]), *_crowded(results)]),
        _TAKEN,
    ]
    if results["workers"] is not None:
        blocks += _workers(results["workers"])
    return "\n\n".join([*blocks, f"**{results['recommendation']}**"])


def _where(results: Results) -> str:
    if "assumed" in results:
        return f"Assumed, not measured: {results['assumed']}."
    return f"Machine: {machines.describe_machine(results['machine'])}"


def _crowded(results: Results) -> list[str]:
    """Return why background communication is slow if there are as many ranks as cores, or more."""
    cores = results.get("machine", {}).get("cores")
    if cores is None or results["nodes"] > 1 or results["ranks"] < cores:
        return []
    return [
        f"The {results['ranks']} ranks have {cores} cores: communication in the background (double_buffering, overlap) "
        "has no core of its own here, so it is slower than predicted."
    ]


def reliability(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the errors of the predictions, as a sentence."""
    errors = {row["name"]: row["error"] for row in rows if row["error"] is not None}
    if not errors:
        return "No algorithm was run, so the errors of the predictions are unknown."
    worst = max(errors, key=lambda name: abs(math.log1p(errors[name])) if errors[name] > -1 else math.inf)
    off = statistics.median(map(abs, errors.values()))
    return f"The median error of the predictions is {off:.0%}; the largest is {errors[worst]:+.0%}, for {worst}."


def _workers(found: Results) -> list[str]:
    rows, before = [], None
    for count, distance in found["distances"].items():
        grew = "–" if before is None or distance is None or not before[1] else f"{distance / before[1]:.2f} times"
        even = "–" if before is None else f"{int(count) / before[0]:g} times"
        rows.append([count, "diverged" if distance is None else f"{distance:.3g}", grew, even])
        before = (int(count), distance)
    heads = ["P, local models", "D, their distance", "growth", "in proportion"]
    chosen = f"Limit of local models: {found['chosen']} ({found['task']}): {found['reason']}. {_RULE}"
    return [chosen, table(heads, rows)]


def draw(results: Results, figure: Any) -> None:
    """Draw the measured exchanges, the communication of algorithms (predicted and measured), and D over P."""
    left, middle, right = figure.subplots(1, 3, width_ratios=[2, 4, 2])
    for place, label in _PLACES.items():
        points = [(size, seconds) for where, size, seconds in results["samples_of_rates"] if where == place]
        if points:
            x, y = zip(*points)
            left.plot(x, [1e3 * value for value in y], "o-", color=_COLOURS[place], label=label)
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms", title="One exchange")
    left.legend(fontsize=7)
    rows = results["rows"][::-1]
    for shift, key, label in ((0.2, "communication", "predicted"), (-0.2, "measured", "measured")):
        values = [1e3 * (row[key] or 0) for row in rows]
        middle.barh([k + shift for k in range(len(rows))], values, 0.4, color=_COLOURS[label], label=label)
    middle.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=6)
    middle.set(xlabel="ms per step", title="Communication")
    middle.legend(fontsize=7)
    if results["workers"] is not None:
        points = [(int(count), value) for count, value in results["workers"]["distances"].items() if value is not None]
        if points:
            x, y = zip(*points)
            right.plot(x, y, "o-", color=_COLOURS["measured"], label="D")
            right.plot(x, [y[0] * one / x[0] for one in x], "--", color=_COLOURS["ideal"], label="in proportion")
            right.legend(fontsize=7)
    right.set(xlabel="P, local models", title="Distance from the mean")


REPORTS = {"plan": Report(markdown, draw)}
