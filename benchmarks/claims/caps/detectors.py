"""Section 3.1: which detector deserves its place, at equal bytes; the source's three, and one by movement."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from claims.caps.accuracy import MARGIN
from claims.caps.training import FULL, QUICK, Training
from claims.claim import Claim, Found, Plan
from claims.evidence import alike, below, differences, exact
from claims.papers import CAPS
from sordino.report import Results

EPOCHS, SEEDS = 20, 5
BLOCK = 1024  # bytes
THRESHOLDS = (5.0, 15.0, 30.0, 60.0)  # of movement: percent of the elements that are sent in any case
OTHERS = ("naive", "random", "history")
_COLOURS = {"naive": "#3d5a80", "random": "#e0a458", "history": "#c8553d", "movement": "#0b6e4f"}


def training(detector: str, seed: int, epochs: int, task: Results, threshold: float = 10.0) -> Training:
    """Return the training of a detector on blocks, so that there is something to choose."""
    options = {"detector": detector, "threshold": threshold, "granularity": "block", "block_bytes": BLOCK}
    return Training(seed, epochs, options=options, decays=True, **task)


def between(sent: float, known: Sequence[tuple[float, float]]) -> float | None:
    """Return the value at so many bytes, on straight lines between those known; None beyond their ends.

    Args:
        sent: bytes.
        known: pairs of bytes and value.
    """
    ordered = sorted(known)
    for (left, low), (right, high) in itertools.pairwise(ordered):
        if left <= sent <= right:
            return low + (high - low) * (sent - left) / (right - left) if right > left else low
    return None


def plan(quick: bool) -> Plan:
    """The source's detectors as they are, movement at several thresholds; compared at each one's bytes."""
    epochs, seeds, task = (2, 2, QUICK) if quick else (EPOCHS, SEEDS, FULL)
    kinds = [(name, 10.0) for name in OTHERS] + [("movement", threshold) for threshold in (0.0, *THRESHOLDS, 101.0)]
    keys = [(*kind, seed) for kind in kinds for seed in range(1, seeds + 1)]
    found = yield [training(name, seed, epochs, task, threshold).run for name, threshold, seed in keys]
    runs = {kind: found[k * seeds : (k + 1) * seeds] for k, kind in enumerate(kinds)}
    moved = [[runs[kind][k] for kind in kinds if kind[0] == "movement"] for k in range(seeds)]
    evidence = []
    for name in ("history", "random"):
        sent = [one["sent_in_all"] for one in runs[name, 10.0]]
        gap = differences(sent, [one["sent_in_all"] for one in runs["naive", 10.0]])
        evidence.append(alike(f"{name} - naive: bytes sent, percent of unskipped training's, within 5", gap, 5.0))
    for name in OTHERS:
        distances, tests = [], []
        for one, others in zip(runs[name, 10.0], moved, strict=True):
            own = between(one["sent_in_all"], [(run["sent_in_all"], distance(run)) for run in others])
            test = between(one["sent_in_all"], [(run["sent_in_all"], run["test"]) for run in others])
            if own is not None and test is not None:
                distances.append(100 * (own / distance(one) - 1) if distance(one) > 0 else 0.0)
                tests.append(test - one["test"])
        told = ", ".join(f"{one['sent_in_all']:.1f}" for one in runs[name, 10.0])
        what = f"As many bytes as {name}: distance between workers, movement's above {name}'s, percent; below 0"
        evidence.append(replace(below(what, distances), note=f"{name}: seeds 1 to {seeds} send {told} % of the bytes"))
        what = f"As many bytes as {name}: movement - {name}, accuracy, points, within {MARGIN:g}"
        evidence.append(alike(what, tests, MARGIN))
    for threshold in THRESHOLDS:
        some = runs["movement", threshold]
        share = statistics.fmean(one["sent_in_all"] for one in some)
        lost = differences([one["test"] for one in some], [one["test"] for one in runs["movement", 101.0]])
        what = (
            f"movement at {threshold:g} %, {share:.0f} % of the bytes: accuracy - unskipped, points, within {MARGIN:g}"
        )
        evidence.append(alike(what, lost, MARGIN))
    for name, threshold in (("naive", 10.0), ("movement", THRESHOLDS[0])):
        sent = [one["sent_in_all"] for one in runs[name, threshold]]
        what = f"{name} at {threshold:g} %: bytes that one seed sends above another, percent of all; less than 5"
        evidence.append(exact(what, max(sent) - min(sent), max(sent) - min(sent) < 5))
    points = [{"detector": name, "threshold": at, "runs": _points(some)} for (name, at), some in runs.items()]
    return Found(evidence, {"points": points})


def distance(run: Results) -> float:
    """Return the mean consensus distance over the epochs."""
    return statistics.fmean(run["distance"])


def _points(runs: Sequence[Results]) -> list[tuple[float, float, float]]:
    return [(one["sent_in_all"], distance(one), one["test"]) for one in runs]


def draw(shapes: Results, figure: Any) -> None:
    """Distance and accuracy against bytes, a point a seed."""
    figure.set_size_inches(10, 4)
    labels = ("distance between workers", "test accuracy, %")
    for place, (axes, label) in enumerate(zip(figure.subplots(1, 2), labels, strict=True), start=1):
        seen: set[str] = set()
        for one in shapes["points"]:
            name = one["detector"]
            values = [run[place] for run in one["runs"]]
            sent = [run[0] for run in one["runs"]]
            axes.plot(sent, values, "o", color=_COLOURS[name], alpha=0.7, label=None if name in seen else name)
            seen.add(name)
        axes.set_xlabel("bytes sent, % of unskipped training's; a point is a seed")
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    figure.tight_layout()


CLAIM = Claim(
    name="caps-detectors",
    paper=CAPS,
    place="Section 3.1",
    says="History-based search makes up for what random samples miss, so it finds what naive comparison finds.",
    setting="No measurement of what the detectors find is given.",
    here=f"The network with dropout, {EPOCHS} epochs, blocks of {BLOCK} bytes, all three at a threshold of 10 %; "
    f"beside them `detector='movement'`, which is ours, at thresholds up to {THRESHOLDS[-1]:g} %. It is compared at "
    f"the bytes that each of the three sends; {SEEDS} seeds.",
    plan=plan,
    why="By design history sends more than naive detection: it compares those that have changed most often, so it "
    "finds least unchanged. How much more is not settled, because of one seed in which naive sends 57 %. "
    "`movement`, ours, keeps an exponential average of how far each block moves and sends those that move most. "
    "At the bytes of the others it is no better: accuracies are alike, and the distance between workers, if "
    "anything, larger. It deserves its place by something else: how much is sent is for the user to say, and is "
    "the same for all seeds, where the others send what rounding leaves them. With a quarter of the bytes it "
    "loses 0.16 points, within half a point of sending everything, where none of the others gets with blocks "
    "compared bit for bit.",
    draw=draw,
)
