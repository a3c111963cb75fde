"""Tables and plots of the parts of the local SGD benchmark."""

from __future__ import annotations

from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_METHODS = {"synchronous": "synchronous SGD", "allreduce": "whole models", "sharded": "shards"}
_PLACES = {
    "here": "one machine",
    "ranks": "one rank per host",
    "groups": "one group per host",
    "hosts": "one rank per host",
}
_SETS = {"resnet20": "ResNet-20", "edsr": "EDSR", "resnet50": "ResNet-50"}
_COLOURS = {"gradients": "#3d5a80", "averaging": "#c8553d", "ratios": "#0b6e4f"}


def per_step(entry: Results, name: str, interval: int) -> dict[str, float]:
    """Return the seconds per step of each part, measured and predicted."""
    local = name != "synchronous"
    measured = entry["averaging"]["median"] / interval if local else 0.0
    return {
        "gradients": entry["gradients"]["median"],
        "averaging": measured,
        "total": entry["gradients"]["median"] + measured,
        "predicted": entry["predicted"]["gradients"] + entry["predicted"]["averaging"] / interval,
    }


def communication(results: Results) -> str:
    """Return the times per step of each part and the predictions as Markdown."""
    what = (
        f"Time of communication per step without computation, on this machine and on emulated hosts with links of "
        f"{results['mbps']:g} Mbps each way: synchronous SGD (AllReduce over all P K ranks), and local SGD of P "
        "groups of K ranks that averages whole models or shards. Gradients are averaged every step, models every "
        + " and ".join(f"{interval} ({_SETS[name]})" for name, interval in results["intervals"].items())
        + ". Predictions are T = s α + w β with α and β measured in the same job. Medians of the slowest rank's times."
    )
    blocks = verdicts.head(results, "Communication in a step of local SGD", what)
    places = dict.fromkeys((row["set"], row["place"]) for row in results["rows"])
    for name, place in places:
        rows = [row for row in results["rows"] if (row["set"], row["place"]) == (name, place)]
        count = rows[0]["parameters"]
        blocks.append(f"## {_SETS[name]} ({count / 1e6:.3g} M parameters), {_PLACES[place]}")
        lines = []
        for row in rows:
            for key, entry in row["contestants"].items():
                one = per_step(entry, key, results["intervals"][name])
                lines.append(
                    [
                        f"P={row['groups']} K={row['members']} {_METHODS[key]}",
                        *[format_seconds(one[part]) for part in ("gradients", "averaging", "total", "predicted")],
                        f"{one['predicted'] / one['total'] - 1:+.0%}",
                        f"{entry['sent'] / 1e6:.3g} MB",
                    ]
                )
        heads = ["", "Gradients", "Models", "Together", "Predicted", "Error", "Rank 0 sent, averaging every 2"]
        blocks.append(table(heads, lines))
    return "\n\n".join(blocks)


def draw_communication(results: Results, figure: Any) -> None:
    """Draw stacked bars as in the source's Figures 6 and 10, one panel per set and place."""
    places = list(dict.fromkeys((row["set"], row["place"]) for row in results["rows"]))
    panels = figure.subplots(1, len(places), squeeze=False)[0]
    for axes, (name, place) in zip(panels, places, strict=True):
        labels: list[str] = []
        parts: dict[str, list[float]] = {"gradients": [], "averaging": []}
        for row in results["rows"]:
            if (row["set"], row["place"]) != (name, place):
                continue
            for key, entry in row["contestants"].items():
                one = per_step(entry, key, results["intervals"][name])
                labels.append(f"{row['groups']}×{row['members']} {key}")
                for part, values in parts.items():
                    values.append(1e3 * one[part])
        spots = range(len(labels))
        axes.bar(spots, parts["gradients"], color=_COLOURS["gradients"], label="gradients")
        axes.bar(spots, parts["averaging"], bottom=parts["gradients"], color=_COLOURS["averaging"], label="models")
        axes.set_xticks(spots, labels, rotation=90, fontsize=5)
        axes.set_title(f"{_SETS[name]}, {_PLACES[place]}", fontsize=7)
        axes.tick_params(axis="y", labelsize=6)
    panels[0].set_ylabel("ms of communication a step")
    panels[0].legend(fontsize=6)


def against_torch(results: Results) -> str:
    """Return times per step, and PyTorch's over ours, as Markdown."""
    what = (
        f"{results['ranks']} ranks, models averaged every {results['interval']} steps, SGD with momentum; forward and "
        "backward are a sum over the parameters. PyTorch: PostLocalSGDOptimizer with a PeriodicModelAverager, and with "
        f"groups of two DDP's post-local hook, over Gloo. Emulated hosts have links of {results['mbps']:g} Mbps. "
        "The time of a step is the mean over an interval and includes computation. Ratios are medians over rounds."
    )
    lines = []
    for row in results["rows"]:
        names = [name for name in ("allreduce", "sharded", "torch") if name in row["contestants"]]
        cells = {name: format_seconds(row["contestants"][name]["median"]) for name in names}
        ratios = [f"{row['ratios'][name]:.2f}×" if name in row["ratios"] else "–" for name in ("allreduce", "sharded")]
        label = f"{_SETS[row['set']]}, K={row['members']}, {_PLACES[row['place']]}"
        lines.append([label, *[cells.get(name, "–") for name in ("allreduce", "sharded", "torch")], *ratios])
    heads = ["", "Whole models", "Shards", "PyTorch", "PyTorch / whole models", "PyTorch / shards"]
    return "\n\n".join([*verdicts.head(results, "Local SGD against PyTorch's", what), table(heads, lines)])


def draw_torch(results: Results, figure: Any) -> None:
    """Draw PyTorch's times over ours."""
    axes = figure.subplots()
    labels, values = [], []
    for row in results["rows"]:
        for name, ratio in row["ratios"].items():
            labels.append(f"{_SETS[row['set']]}, K={row['members']}, {_PLACES[row['place']]}, {_METHODS[name]}")
            values.append(ratio)
    axes.barh(range(len(labels)), values, color=_COLOURS["ratios"])
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.axvline(1, color="black", lw=0.8)
    axes.set(xlabel="PyTorch's time a step over ours")


def plan(results: Results) -> str:
    """Return errors by algorithm, and all predictions, as Markdown."""
    by = {"mpirun": "mpirun, over MPI", "torchrun": "torchrun, over UCX"}[results.get("starter", "mpirun")]
    what = (
        f"`sordino plan` on emulated hosts with links of {results['mbps']:g} Mbps, started by {by}, "
        f"{results['parameters'] / 1e6:.3g} M parameters: predicted over measured communication per step, less one. α "
        "and β are measured again in each plan."
    )
    lines = [
        [name, f"{one['median']:.0%}", f"{one['most']:+.0%}", str(one["count"])]
        for name, one in results["errors"].items()
    ]
    blocks = verdicts.head(results, "Predictions of the cost model", what, unit="")
    blocks.append(table(["", "Median of absolute errors", "Largest", "Runs"], lines))
    places = dict.fromkeys((row["hosts"], row["ranks_per_host"]) for row in results["rows"])
    for place in places:
        rows = [row for row in results["rows"] if (row["hosts"], row["ranks_per_host"]) == place]
        blocks.append(f"## {place[0]} hosts, {place[1]} rank(s) each")
        lines = []
        for name in sorted({one["name"] for row in rows for one in row["rows"] if one["measured"] is not None}):
            found = [one for row in rows for one in row["rows"] if one["name"] == name and one["measured"] is not None]
            pairs = [f"{1e3 * one['communication']:.4g} / {1e3 * one['measured']:.4g}" for one in found]
            lines.append([name, "; ".join(pairs)])
        blocks.append(table(["", "Predicted / measured, ms"], lines))
    return "\n\n".join(blocks)


def draw_plan(results: Results, figure: Any) -> None:
    """Draw predictions against measurements."""
    axes = figure.subplots()
    for name in results["errors"]:
        found = [
            one for row in results["rows"] for one in row["rows"] if one["name"] == name and one["measured"] is not None
        ]
        axes.plot(
            [1e3 * one["measured"] for one in found],
            [1e3 * one["communication"] for one in found],
            "o",
            ms=3,
            label=name,
        )
    ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
    ends[0] = max(ends[0], 1.0)
    axes.plot(ends, ends, color="black", lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms a step", ylabel="predicted, ms a step")
    axes.legend(fontsize=5)


def overlap(results: Results) -> str:
    """Return the ratios by loading as Markdown."""
    what = (
        f"A group of two ranks trains a model of {results['bytes'] / 1e6:.3g} MB with sharded local SGD. After "
        "`step()` a batch is loaded (sleep) for 0, ½, 1 and 2 times the time of a `step()` that waits for the gather; "
        "then forward begins. Values are times with overlap=True over times without, in turns: of `step()`, and of all "
        f"but loading. Hosts are emulated, with links of {results['mbps']:g} Mbps each way. Medians "
        "of ratios of the slowest rank's times."
    )
    lines = [
        [f"{row['place']}: {label}", *(f"{one[part]:.2f}" for one in row["contestants"]["overlap"]["ratios"].values())]
        for row in results["rows"]
        for part, label in (("step", "`step()`"), ("all", "all but loading"))
    ]
    blocks = verdicts.head(results, "Local SGD: overlapped gathers", what)
    return "\n\n".join([*blocks, table(["", "Load 0", "½", "1", "2"], lines)])


def draw_overlap(results: Results, figure: Any) -> None:
    """Draw ratios against loading, one panel per place."""
    for axes, row in zip(figure.subplots(1, len(results["rows"]), sharey=True), results["rows"]):
        ratios = row["contestants"]["overlap"]["ratios"]
        for part, label in (("step", "step()"), ("all", "all but loading")):
            axes.plot([float(load) for load in ratios], [one[part] for one in ratios.values()], "o-", label=label)
        axes.set_title(row["place"])
        axes.set_xlabel("loading, in steps that wait")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")


REPORTS = {
    "local_sgd_communication": Report(communication, draw_communication),
    "local_sgd_overlap": Report(overlap, draw_overlap),
    "local_sgd_plan": Report(plan, draw_plan),
    "local_sgd_torch": Report(against_torch, draw_torch),
}
