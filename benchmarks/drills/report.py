"""Tables and plot of the soak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sordino.report import Results, verdicts
from sordino.report.records import Report
from sordino.report.tables import format_seconds, table

_WAYS = {
    "restart": "all ranks are started again and continue from the newest checkpoint",
    "continue": "the other ranks continue; if none is left, all are started again from the newest checkpoint",
}


def _what(results: Results) -> str:
    training = f"`examples/train.py --data {results['data']} --algorithm {results['algorithm']}`"
    return (
        f"{training} on {results['ranks']} ranks, {results['steps']} steps, a checkpoint every "
        f"{results['checkpoint_every']}. For {results['minutes']:g} minutes ranks are killed with SIGKILL, on average "
        f"every {results['every']:g} s, at random moments; with a probability of 1/4 two at once. Then "
        f"{_WAYS[results['mode']]}. Seed {results['seed']}."
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _spread(values: Sequence[float], unit: str) -> str:
    if not values:
        return "–"
    return f"median {statistics.median(values):.3g}{unit}, worst {max(values):.3g}{unit} of {len(values)}"


def _summary(results: Results) -> str:
    calm, stormy = results["undisturbed"], results["disturbed"]
    rows = [
        ["Test accuracy", _share(calm["test_accuracy"]), _share(stormy.get("test_accuracy"))],
        ["Time, s", f"{calm['seconds']:.0f}", f"{stormy['seconds']:.0f}"],
        ["Steps taken more than once", "0", str(stormy["steps_repeated"])],
        ["Kills (ranks killed)", "0", f"{len(stormy['kills'])} ({sum(len(one['ranks']) for one in stormy['kills'])})"],
        ["Restarts", "0", str(stormy["restarts"])],
        ["Damaged checkpoints skipped", "0", str(stormy["checkpoints_passed_over"])],
        ["Bits of the model", calm["parameters_sha256"][:12], stormy.get("parameters_sha256", "–")[:12]],
    ]
    return table(["", "Undisturbed", "With kills"], rows)


def _times(results: Results) -> str:
    rows = []
    for outlived, name, unit, factor in (
        (True, "other ranks continued", " ms", 1e3),
        (False, "all were started again", " s", 1),
    ):
        found = [one for one in results["disturbed"]["kills"] if one["outlived"] is outlived and one["ranks_after"]]
        seconds = [one["seconds_to_go_on"] * factor for one in found]
        rows.append([name, _spread(seconds, unit), _spread([one["steps_repeated"] for one in found], "")])
    return table(["After a kill", "Until the next step", "Steps taken again"], rows)


def _kill(one: Results) -> list[str]:
    seconds, after = one["seconds_to_go_on"], one["ranks_after"]
    return [
        f"{one['at']:.1f}",
        " and ".join(map(str, one["ranks"])) + f" of {one['alive']}",
        "starting" if one["after_step"] is None else str(one["after_step"]),
        "at the end" if seconds is None else format_seconds(seconds),
        "–" if after is None else str(after),
        "–" if one["steps_repeated"] is None else str(one["steps_repeated"]),
    ]


def report(results: Results) -> str:
    """Return the targets, both trainings and every kill as Markdown."""
    blocks = [
        *verdicts.opening(results, "Soak: ranks killed while they train", _what(results)),
        "## Targets",
        verdicts.target_table(results["targets"], ""),
        "## Both trainings",
        _summary(results),
        _times(results),
        "If another rank is killed before the next step, the time until that step is longer.",
        "## Every kill",
        table(
            ["At, s", "Ranks", "After step", "Next step after", "By ranks", "Taken again"],
            map(_kill, results["disturbed"]["kills"]),
        ),
    ]
    left, output = results["disturbed"]["left"], results["disturbed"].get("output")
    blocks += ["**Left behind:** " + ", ".join(left)] if left else []
    blocks += [f"The job failed:\n```\n{output}\n```"] if output else []
    return "\n\n".join(blocks)


def draw(results: Results, figure: Any) -> None:
    """Draw steps against time, undisturbed and with kills."""
    axes = figure.subplots()
    for name, colour, label in (("undisturbed", "#888888", "undisturbed"), ("disturbed", "#0b6e4f", "with kills")):
        points = results[name]["course"]
        axes.plot([at / 60 for at, _ in points], [step for _, step in points], color=colour, lw=1.2, label=label)
    for number, one in enumerate(results["disturbed"]["kills"]):
        known = "ranks killed" if number == 0 else None
        axes.axvline(one["at"] / 60, color="#c8553d", lw=0.6, alpha=0.6, zorder=0, label=known)
    axes.set(
        xlabel="minutes since the job's start", ylabel="step", title=f"{results['ranks']} ranks, {results['mode']}"
    )
    axes.grid(alpha=0.3)
    axes.legend()


REPORTS = {"soak": Report(report, draw)}
