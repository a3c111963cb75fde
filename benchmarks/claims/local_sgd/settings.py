"""How the two studies are run: in full, and in small."""

from __future__ import annotations

from dataclasses import replace

from claims.local_sgd.study import Study

CLASSIFICATION = Study(
    task={
        "problem": "classification",
        "data": "fashion-mnist",
        "images": 16384,
        "held_out": 5000,
        "epochs": 32,
        "batch": 128,
        "interval": 8,
        "rule": "linear",
    },
    rates=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4),
    counts=(1, 2, 4, 8, 16, 32),
    seeds=10,
    bears=4,
    drops={2: 0.30, 4: 0.33, 8: 0.80, 16: 2.63, 32: 6.36},
    margin=0.5,
    unit="points",
)
RESOLUTION = Study(
    task={
        "problem": "resolution",
        "data": "fashion-mnist",
        "images": 2048,
        "held_out": 1000,
        "epochs": 16,
        "batch": 16,
        "interval": 4,
        "rule": "sqrt",
    },
    rates=(0.0005, 0.001, 0.002, 0.004),
    counts=(1, 2, 4, 8, 16),
    seeds=10,
    bears=8,
    drops={2: -0.04, 4: 0.25, 8: 0.46, 16: 3.40},
    margin=0.5,
    unit="dB",
)
_SMALL = {"data": "digits", "held_out": 256}


def classification(quick: bool) -> Study:
    """Return the study of the source's Table I, and of Figures 2 to 4."""
    if not quick:
        return CLASSIFICATION
    task = CLASSIFICATION.task | _SMALL | {"images": 1024, "epochs": 4, "batch": 32}
    return replace(CLASSIFICATION, task=task, rates=(0.05, 0.1), counts=(1, 2, 4), seeds=2, bears=2)


def resolution(quick: bool) -> Study:
    """Return the study of the source's Table II, and of Figures 7 and 8."""
    if not quick:
        return RESOLUTION
    task = RESOLUTION.task | _SMALL | {"images": 512, "epochs": 4}
    return replace(RESOLUTION, task=task, rates=(0.001, 0.002), counts=(1, 2, 4), seeds=2, bears=2)
