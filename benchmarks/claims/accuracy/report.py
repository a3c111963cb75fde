"""Tables and plot of the accuracy benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from claims.accuracy.claims import METHODS, at
from sordino.report import Results, machines
from sordino.report.records import Report
from sordino.report.tables import table

_COLOURS = {"allreduce": "#888888", "sgp": "#c8553d", "crossover": "#0b6e4f", "hierarchical": "#3d5a80"}

Cell = Callable[[Results], str]
Place = tuple[int, int]  # workers and global mini-batch


def _places(results: Results) -> dict[str, dict[int, Place]]:
    """The places of each figure by what its axis counts."""
    first, second = results["batch_figure"], results["worker_figure"]
    return {
        "Batch": {batch: (first["workers"], batch) for batch in first["batches"]},
        "Workers": {workers: (workers, second["batch"]) for workers in second["workers"]},
    }


def _percent(point: Results) -> str:
    spread = "" if point["std"] is None else f" ± {100 * point['std']:.2f}"
    return f"{100 * point['mean']:.2f}{spread}"


def _rate(point: Results) -> str:
    return f"{point['lr']:g}{'*' if point['at_the_edge'] else ''}"


def _distance(point: Results) -> str:
    distance = point["consensus_distance"]
    return "diverged" if distance is None else f"{distance:.3g}"


def _over_rates(point: Results) -> str:
    return _percent(point["over_rates"])


def _grid(results: Results, axis: str, cell: Cell) -> str:
    rows = []
    for number, place in _places(results)[axis].items():
        rows.append([str(number), *[cell(at(results["points"], name, *place)) for name in METHODS]])
    return table([axis, *METHODS.values()], rows)


def _verdicts(results: Results, figure: int) -> str:
    rows = []
    for one in results["claims"]:
        if one["figure"] == figure:
            spread = "–" if one["spread"] is None else f"{100 * one['spread']:.2f}"
            rows.append([one["what"], f"{100 * one['difference']:+.2f}", spread, one["verdict"]])
    return table([f"Figure {figure}: the source's claim", "Difference", "Spread", "Verdict"], rows)


def _what(results: Results) -> str:
    task = results["task"]
    groups = ", ".join(f"{size} of {workers} workers" for workers, size in results["group_sizes"].items())
    rates = ", ".join(f"{lr:g}" for lr in results["rates"])
    return (
        f"A network of three linear layers, trained on {task['images']} images of {task['data']} for {task['epochs']} "
        f"epochs by SGD with momentum {task['momentum']:g}, a warm-up over a tenth of the steps and a cosine to zero. "
        f"Learning rates: {rates}; each method has, at each point, the one with the best mean accuracy on "
        f"{task['held_out']} images held out of training. Tested is the mean of the workers' models on all test "
        f"images. Seeds: {results['seeds']}; they draw the initial parameters, the order of the images and Crossover's "
        "peers. "
        f"Groups of hierarchical Crossover: {groups}."
    )


def report(results: Results) -> str:
    """Claims, accuracies, learning rates and consensus distances."""
    workers, batch = results["batch_figure"]["workers"], results["worker_figure"]["batch"]
    titles = {"Batch": f"{workers} workers", "Workers": f"global mini-batch {batch}"}
    blocks = [
        "# Accuracy of gossip: Figures 6 to 8 of Crossover-SGD, in small",
        _what(results),
        f"Machine: {machines.describe_machine(results['machine'])}",
        "## What holds",
        "In percentage points. The spread is the standard deviation of such a difference between single trainings; "
        "what is within it is not told from chance. “Like” holds if it is within.",
        *[_verdicts(results, figure) for figure in (6, 7, 8)],
    ]
    for axis, title in titles.items():
        blocks += [f"## Test accuracy in percent, {title}", _grid(results, axis, _percent)]
    blocks += [f"## Mean over all learning rates, {titles['Batch']}", _grid(results, "Batch", _over_rates)]
    for axis, title in titles.items():
        blocks += [f"## Learning rate, {title} (* the largest or smallest of the grid)", _grid(results, axis, _rate)]
    for axis, title in titles.items():
        blocks += [f"## Consensus distance, mean over the epochs, {title}", _grid(results, axis, _distance)]
    return "\n\n".join(blocks)


def picture(results: Results, figure: Any) -> None:
    """Test accuracy by global mini-batch, and by workers."""
    titles = {
        "Batch": f"{results['batch_figure']['workers']} workers",
        "Workers": f"global mini-batch {results['worker_figure']['batch']}",
    }
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (axis, places) in zip(panels, _places(results).items(), strict=True):
        for number, (name, label) in enumerate(METHODS.items()):
            found = [at(results["points"], name, *place) for place in places.values()]
            axes.errorbar(
                [where * 1.02 ** (number - 1.5) for where in places],  # side by side
                [100 * point["mean"] for point in found],
                yerr=[100 * (point["std"] or 0) for point in found],
                marker="o",
                ms=4,
                capsize=3,
                color=_COLOURS[name],
                label=label,
            )
        axes.set(xscale="log", xlabel={"Batch": "global mini-batch", "Workers": "workers"}[axis], title=titles[axis])
        axes.set_xticks(list(places), [str(where) for where in places])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="test accuracy, percent")
    panels[0].legend(fontsize=8)


REPORTS = {"accuracy": Report(report, picture)}
