"""Figure 7(b): the threshold's course under the dynamic scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from claims.caps.training import FULL, QUICK, Training
from claims.claim import Claim, Found, Plan
from claims.evidence import above
from claims.papers import CAPS
from sordino.report import Results

EPOCHS, SEEDS = 100, 5
IMAGES = 1024
START, END = 10.0, 21.0  # percent, the source's
METRICS = {"last": "of the last mini-batch", "mean": "mean of the epoch", "validation": "of validation images"}
_SCHEDULER = {"history_length": 3, "frequency": 5, "step": 1.0}
_COLOURS = {"last": "#0b6e4f", "mean": "#3d5a80", "validation": "#c8553d"}


def plan(quick: bool) -> Plan:
    """A training for each metric that can be reported; the threshold after all epochs, and every seed's bytes."""
    epochs, seeds, task = (11, 2, QUICK) if quick else (EPOCHS, SEEDS, FULL | {"images": IMAGES})
    keys = [(metric, seed) for metric in METRICS for seed in range(1, seeds + 1)]
    options: Results = {"threshold": START, "scheduler": _SCHEDULER}
    found = yield [Training(seed, epochs, options=options, metric=metric, **task).run for metric, seed in keys]
    evidence, courses = [], {}
    for metric, words in METRICS.items():
        mine = [one for (name, _), one in zip(keys, found, strict=True) if name == metric]
        ends = [one["threshold"][-1] for one in mine]
        one = above(f"Loss {words}: threshold at the end, percent, above {START:g}", ends, START, END)
        told = "; ".join(f"{end:g} % ({run['sent_in_all']:.0f} % sent)" for end, run in zip(ends, mine, strict=True))
        evidence.append(replace(one, note=f"seeds 1 to {seeds} end at {told}"))
        courses[metric] = [run["threshold"] for run in mine]
    return Found(evidence, {"courses": courses})


def draw(shapes: Results, figure: Any) -> None:
    """The threshold over epochs, a line a seed; and the source's beginning and end."""
    axes = figure.subplots()
    longest = 1
    for metric, courses in shapes["courses"].items():
        for number, course in enumerate(courses):
            label = f"loss {METRICS[metric]}" if number == 0 else None
            axes.plot(range(1, len(course) + 1), course, color=_COLOURS[metric], alpha=0.6, label=label)
            longest = max(longest, len(course))
    axes.plot([1, longest], [START, END], "k:", label="the source's beginning and end")
    axes.set_xlabel("epoch; a line is a seed")
    axes.set_ylabel("threshold, %")
    axes.legend(frameon=False)


CLAIM = Claim(
    name="caps-figure-7b",
    paper=CAPS,
    place="Figure 7(b)",
    says="The dynamic scheduler raises the threshold from 10 % to 21 %: less and less is skipped.",
    setting="ResNet-50 on CIFAR-10, 100 epochs, history length 3, frequency 5 epochs, 1 % an adjustment.",
    here=f"The network with dropout, the same scheduler, {EPOCHS} epochs of {IMAGES} images. Algorithm 1 of the "
    "source reports the loss of the last mini-batch; the epoch's mean and that of images held out stand beside it. "
    f"{SEEDS} seeds.",
    plan=plan,
    why="The course is the source's: with the loss of the last mini-batch, which its Algorithm 1 reports, the "
    "threshold ends at 20 %, the source's at 21. It rises whenever the loss has not got strictly better in every "
    "one of the last three reports, and the noisier the loss, the more often that is: the mean of the epoch ends "
    "at 16 %. What the seeds send says how little that means: bit for bit, four or five of five send 99 % of the "
    "bytes or more at any threshold, and one sends 91 to 93 %.",
    draw=draw,
)
