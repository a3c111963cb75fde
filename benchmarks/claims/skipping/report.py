"""Tables and plots of the parts of the parameter skipping benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_bytes, format_seconds, table

DROP = 0.005  # of the accuracy, from which on it suffers
WAYS = {
    "count": "naive, the kernel alone",
    "still": "the same, nothing has changed",
    "naive": "naive, everything is sent",
    "random": "random",
    "history": "history, mean of an interval",
    "history, no survey": "history, a step without a survey",
    "history, survey": "history, a step with a survey",
    "eq": "torch, tensor by tensor",
    "eq fetched": "torch, each number fetched",
    "add": "as many reads and writes: torch's add_",
    "torch": "copy of as many bytes as the kernel's, torch",
    "numpy": "copy of as many bytes as the kernel's, numpy",
}
_COLOURS = {"threshold": "#0b6e4f", "probes": "#e0a458", None: "#3d5a80", "unskipped": "#888888"}
_SWEEPS = {"threshold": ("a threshold of", " %"), "probes": ("an interval of", " steps between probes")}


# ---- detection -----------------------------------------------------------------------------------------------------


def detection(results: Results) -> str:
    """Milliseconds a step, and over the floor."""
    what = (
        "What finding unchanged parameters costs a step on one core. Half of the elements change between runs (but "
        f"where nothing does). Samples are {results['sample_ratio']:.0%} of each tensor or block; a survey is made "
        f"every {results['survey_interval']} steps; blocks are of {format_bytes(results['block_bytes'])}. The floor is "
        "the faster copy of as many bytes as the kernel reads and writes. A copy may make the processor read what it "
        "overwrites; adding in place does not, like the kernel. The source's detection takes "
        f"{results['source_ms']} ms on a P100."
    )
    blocks = verdicts.head(results, "What detection costs", what)
    for row in results["rows"]:
        floor = row["times"][row["floor"]]["median"]
        lines = []
        for name, label in WAYS.items():
            if name in row["times"]:
                one = row["times"][name]
                quartiles = f"{format_seconds(one['q1'])} … {format_seconds(one['q3'])}"
                lines.append([label, format_seconds(one["median"]), quartiles, f"{one['median'] / floor:.2f}×"])
        count = row["items"]
        blocks.append(f"## By {row['granularity']}: {count} of them, {row['bytes'] / 1e6:.4g} MB")
        blocks.append(table(["", "A step", "Quartiles", "Over the floor"], lines))
    return "\n\n".join(blocks)


def draw_detection(results: Results, figure: Any) -> None:
    """Bars, a panel a granularity."""
    panels = figure.subplots(1, len(results["rows"]), sharex=True, squeeze=False)[0]
    for axes, row in zip(panels, results["rows"], strict=True):
        names = [name for name in reversed(WAYS) if name in row["times"]]
        values = [1e3 * row["times"][name]["median"] for name in names]
        bars = axes.barh(range(len(names)), values, color=_COLOURS["threshold"])
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axes.set_yticks(range(len(names)), [WAYS[name] for name in names], fontsize=7)
        axes.axvline(1e3 * row["times"][row["floor"]]["median"], color="black", lw=0.8)
        axes.axvline(results["source_ms"], color="black", lw=0.8, ls=":")
        axes.set_title(f"by {row['granularity']}; lines: floor, and the source's P100 (dotted)", fontsize=8)
        axes.set_xlabel("ms a step")


# ---- training ------------------------------------------------------------------------------------------------------


def swept(rows: Sequence[Results], what: str) -> list[Results]:
    """The rows of the sweep of "threshold" or "probes", from little skipped to much."""
    found = [row for row in rows if row[what] is not None]
    return sorted(found, key=lambda row: float(row[what]), reverse=what == "threshold")


def training(results: Results) -> str:
    """Accuracy, its difference to that of unskipped training, and bytes; then the sweeps."""
    task, rows = results["task"], results["rows"]
    what = (
        f"A network of two convolutions and two linear layers on {task['data']} ({task['images']} images, "
        f"{task['epochs']} epochs, {results['steps']} steps), {results['workers']} workers with mini-batches of "
        f"{results['batch']}, {results['seeds']} seeds (mean ± deviation). A metric is reported {results['reports']} "
        "times an epoch, as if those were epochs, for the scheduler to act on. Sent: parameters' bytes over those of "
        "unskipped training; bytes are what the transport counts, a worker and step."
    )
    blocks = verdicts.head(results, "Accuracy and bytes of parameter skipping", what, unit="")
    plain = [row for row in rows if row["name"] == "naive" or (row["threshold"] is None and row["probes"] is None)]
    blocks += ["## Detectors, blocks and a moving threshold", _accuracies(plain, rows[0])]
    titles = {"threshold": "## Thresholds (naive)", "probes": "## Steps between probes (naive, at its threshold)"}
    for what, title in titles.items():
        blocks += [title, _accuracies(swept(rows, what), rows[0]), _suffers(results, what)]
    return "\n\n".join(blocks)


def _label(row: Results) -> str:
    both = row["threshold"] is not None and row["probes"] is not None
    return f"{row['name']} ({row['threshold']:g} %, {row['probes']} steps between probes)" if both else row["name"]


def _accuracies(rows: list[Results], unskipped: Results) -> str:
    lines = []
    for row in rows:
        spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
        difference = 100 * (row["accuracy"] - unskipped["accuracy"])
        lines.append(
            [
                _label(row),
                f"{100 * row['accuracy']:.2f}{spread}",
                "–" if row is unskipped else f"{difference:+.2f}",
                f"{row['share']:.1%}",
                f"{row['bytes'] / 1e3:.4g} kB",
                f"{row['bytes'] / unskipped['bytes']:.3f}×",
            ]
        )
    return table(["", "Accuracy, %", "Difference, points", "Sent", "Bytes", "Over unskipped"], lines)


def _suffers(results: Results, what: str) -> str:
    """The sentence."""
    at, (before, after) = results["suffers"][what], _SWEEPS[what]
    place = "nowhere in this range" if at is None else f"{before} {at:g}{after}"
    return f"Accuracy (its mean more than {100 * DROP:g} points below unskipped) starts to suffer at: **{place}**."


def draw_training(results: Results, figure: Any) -> None:
    """Unchanged ratios by tensor as in the source's Figure 2, the moving threshold, and accuracy against bytes."""
    left, middle, right = figure.subplots(1, 3)
    named = {row["name"]: row for row in results["rows"]}
    naive, moving = named["naive"], named["naive, scheduler"]
    steps = [point["step"] for point in naive["points"]]
    for index, name in enumerate(naive["tensors"]):
        left.plot(steps, [100 * point["ratios"][index] for point in naive["points"]], label=name)
    left.set(xlabel="step", ylabel="%", title="Unchanged elements, naive")
    left.legend(fontsize=6)
    steps = [point["step"] for point in moving["points"]]
    middle.plot(steps, [point["threshold"] for point in moving["points"]], drawstyle="steps-post", label="threshold")
    middle.plot(steps, [100 * point["share"] for point in moving["points"]], ls=":", label="bytes sent")
    middle.set(xlabel="step", ylabel="%", title="With a scheduler")
    middle.legend(fontsize=7)
    for row in results["rows"]:
        kind = "threshold" if row["threshold"] is not None else "probes" if row["probes"] is not None else None
        colour = _COLOURS["unskipped" if row["name"] == "unskipped" else kind]
        place = row["bytes"] / 1e3, 100 * row["accuracy"]
        right.errorbar(*place, yerr=100 * (row["spread"] or 0), marker="o", ms=4, capsize=3, color=colour)
        label = row["name"].removeprefix("naive, ").removesuffix(" between probes")
        right.annotate(label, place, fontsize=5, xytext=(3, 3), textcoords="offset points")
    right.margins(x=0.15)
    right.axhline(100 * (named["unskipped"]["accuracy"] - DROP), color="black", lw=0.8, ls=":")
    right.set(xlabel="kB a worker and step", ylabel="test accuracy, %", title="Accuracy against bytes")


# ---- communication -------------------------------------------------------------------------------------------------


def over_unskipped(row: Results, name: str, key: str) -> float:
    """How a contestant's "exposed" seconds (their mean) or "bytes" compare with those of the one that skips nothing."""
    one, other = row["contestants"][name][key], row["contestants"]["unskipped"][key]
    return float(one / other) if key == "bytes" else float(one["mean"] / other["mean"])


def where(row: Results) -> str:
    """The job, in words."""
    return f"{row['hosts']} hosts, {row['ranks_per_host']} rank{'s' if row['ranks_per_host'] > 1 else ''} on each"


def communication(results: Results) -> str:
    """Milliseconds of a step and bytes, over those of unskipped training."""
    settings = results["settings"]
    what = (
        f"Training on {settings['data']} by four workers on emulated hosts with links of {results['mbps']:g} Mbps each "
        f"way: {settings['warm-up'] * settings['steps']} steps first, then {settings['turns'] * settings['steps']} "
        "measured ones in turns. Communication: what a step waits for it, the slowest rank's, mean and median. Rest: "
        "what else optimizer.step() does: SGD, and for parameter skipping detection (for unskipped, too). AllReduce "
        "averages gradients while backward runs, which the others' wait leaves out. Sent: parameters' bytes over those "
        "of unskipped training. Bytes: what the transport counts, a worker and step. Every "
        "worker is a server, of whole tensors or blocks; those above an eighth of its share are cut."
    )
    blocks = verdicts.head(results, "Communication in a step of parameter skipping", what)
    for row in results["rows"]:
        lines = []
        for name, one in row["contestants"].items():
            lines.append(
                [
                    name,
                    format_seconds(one["exposed"]["mean"]),
                    f"{over_unskipped(row, name, 'exposed'):.3f}×",
                    format_seconds(one["exposed"]["median"]),
                    format_seconds(one["rest"]["median"]),
                    f"{one['share']:.1%}" if "share" in one else "–",
                    f"{one['bytes'] / 1e3:.4g} kB",
                    f"{over_unskipped(row, name, 'bytes'):.3f}×",
                ]
            )
        heads = ["", "Communication", "Over unskipped", "Median", "Rest, median", "Sent", "Bytes", "Over unskipped"]
        blocks += [f"## {where(row)} ({row['parameters']:,} parameters)", table(heads, lines)]
    return "\n\n".join(blocks)


def draw_communication(results: Results, figure: Any) -> None:
    """Time and bytes over unskipped, a panel a job."""
    panels = figure.subplots(1, len(results["rows"]), sharey=True, squeeze=False)[0]
    for axes, row in zip(panels, results["rows"], strict=True):
        names = list(row["contestants"])
        for shift, key, colour in ((-0.2, "exposed", _COLOURS["threshold"]), (0.2, "bytes", _COLOURS["unskipped"])):
            values = [over_unskipped(row, name, key) for name in names]
            places = [place + shift for place in range(len(names))]
            axes.bar(places, values, 0.38, color=colour, label="communication" if key == "exposed" else "bytes")
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=7)
        axes.set_title(where(row))
    panels[0].set_ylabel("over unskipped")
    panels[0].legend(fontsize=7)


REPORTS = {
    "skipping_communication": Report(communication, draw_communication),
    "skipping_detection": Report(detection, draw_detection),
    "skipping_training": Report(training, draw_training),
}
