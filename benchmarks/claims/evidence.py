"""Evidence: a difference is as sure as its standard error says, and a verdict follows from nothing else.

Seeds share initial values and the order of the data across algorithms, so a difference is taken seed by seed: the mean
of the paired differences, its standard error and their number. What lies within two standard errors is not told apart
from chance. Trainings that collapsed are counted and shown, never averaged in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

HOLDS = "holds"
DIRECTION = "holds in direction"
FAILS = "does not hold"
OPEN = "not told apart"
ELSEWHERE = "needs another machine"
VERDICTS = (HOLDS, DIRECTION, FAILS, OPEN, ELSEWHERE)
_SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Evidence:
    """One statement, and what was found of it.

    Attributes:
        what: the statement, with what is compared and the unit of the figure.
        source: the source's figure, in its unit; None where it gives none.
        ours: the mean of ours; None where it cannot be found here.
        error: its standard error; None where there is one value, or a count that has none.
        count: values that the mean is of.
        collapsed: trainings that are not among them, because they collapsed.
        note: why it cannot be found here, or what else a reader must know.
    """

    what: str
    source: float | None
    ours: float | None
    error: float | None
    count: int
    verdict: str
    collapsed: int = 0
    note: str = ""


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of some values and its standard error (None of one value).

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("no values, so there is no mean")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def differences(plus: Sequence[float], minus: Sequence[float]) -> list[float]:
    """Return what one has above the other, seed by seed."""
    return [one - other for one, other in zip(plus, minus, strict=True)]


def above(
    what: str, values: Sequence[float], limit: float = 0.0, source: float | None = None, collapsed: int = 0
) -> Evidence:
    """Judge that what the values are drawn from has a mean above a limit.

    Where the source gives a figure, an effect that is surely less than half of the source's holds in direction only.
    """
    if not values:
        return _without_values(what, source, collapsed)
    mean, error = mean_and_error(values)
    reach = _SURE * error if error is not None else math.inf
    if mean - reach > limit:
        half = None if source is None else (source - limit) / 2
        verdict = DIRECTION if half is not None and mean + reach - limit < half else HOLDS
    else:
        verdict = FAILS if mean + reach < limit else OPEN
    return Evidence(what, source, mean, error, len(values), verdict, collapsed)


def below(
    what: str, values: Sequence[float], limit: float = 0.0, source: float | None = None, collapsed: int = 0
) -> Evidence:
    """Judge that what the values are drawn from has a mean below a limit."""
    turned = above(what, [-value for value in values], -limit, None if source is None else -source, collapsed)
    ours = None if turned.ours is None else 0.0 - turned.ours  # which is never -0
    return Evidence(what, source, ours, turned.error, turned.count, turned.verdict, collapsed, turned.note)


def alike(
    what: str, values: Sequence[float], margin: float, source: float | None = None, collapsed: int = 0
) -> Evidence:
    """Judge that a mean difference is surely smaller than a margin, whatever its sign."""
    if not values:
        return _without_values(what, source, collapsed)
    mean, error = mean_and_error(values)
    reach = _SURE * error if error is not None else math.inf
    verdict = HOLDS if abs(mean) + reach <= margin else FAILS if abs(mean) - reach > margin else OPEN
    return Evidence(what, source, mean, error, len(values), verdict, collapsed)


def _without_values(what: str, source: float | None, collapsed: int) -> Evidence:
    return Evidence(what, source, None, None, 0, OPEN, collapsed, "no seed is without a collapse")


def exact(what: str, value: float, holds: bool, source: float | None = None, note: str = "") -> Evidence:
    """Judge a figure that has no spread: a count, or the result of arithmetic."""
    return Evidence(what, source, value, None, 1, HOLDS if holds else FAILS, 0, note)


def elsewhere(what: str, source: float | None, machine: str) -> Evidence:
    """Say what machine it would take."""
    return Evidence(what, source, None, None, 0, ELSEWHERE, 0, machine)
