"""Statements, their values and their verdicts. A verdict follows from the mean and its standard error alone.

Seeds share initial values and the order of the data across algorithms. So a difference is taken seed by seed: the mean
of the paired differences, its standard error and their number. If the mean is within two standard errors of the limit,
the verdict is "not told apart". Collapsed trainings are counted and shown, but left out of the mean.
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
    """One statement with its values and its verdict.

    Attributes:
        what: the statement, with the compared quantities and the unit.
        source: the source's value in that unit; None if the source gives no value.
        ours: the mean of our values; None if it cannot be measured here.
        error: standard error of the mean; None for a single value or an exact count.
        count: number of values in the mean.
        verdict: one of VERDICTS.
        collapsed: number of collapsed trainings, which are left out of the mean.
        note: the reason if it cannot be measured here, or other facts for the reader.
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
    """Return the mean of values and its standard error (None for a single value).

    Raises:
        ValueError: the sequence is empty.
    """
    if not values:
        raise ValueError("no values, so there is no mean")
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.fmean(values), error


def differences(plus: Sequence[float], minus: Sequence[float]) -> list[float]:
    """Return the differences of two sequences, seed by seed."""
    return [one - other for one, other in zip(plus, minus, strict=True)]


def above(
    what: str, values: Sequence[float], limit: float = 0.0, source: float | None = None, collapsed: int = 0
) -> Evidence:
    """Judge whether the expected value of the samples is above a limit.

    If the source gives a value, and the effect is surely less than half of the source's, it holds in direction only.
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
    """Judge whether the expected value of the samples is below a limit."""
    turned = above(what, [-value for value in values], -limit, None if source is None else -source, collapsed)
    ours = None if turned.ours is None else 0.0 - turned.ours  # not -0.0
    return Evidence(what, source, ours, turned.error, turned.count, turned.verdict, collapsed, turned.note)


def within(
    what: str, values: Sequence[float], margin: float, source: float | None = None, collapsed: int = 0
) -> Evidence:
    """Judge whether the expected value of the samples is within `margin` of 0."""
    if not values:
        return _without_values(what, source, collapsed)
    mean, error = mean_and_error(values)
    reach = _SURE * error if error is not None else math.inf
    verdict = HOLDS if abs(mean) + reach <= margin else FAILS if abs(mean) - reach > margin else OPEN
    return Evidence(what, source, mean, error, len(values), verdict, collapsed)


def _without_values(what: str, source: float | None, collapsed: int) -> Evidence:
    return Evidence(what, source, None, None, 0, OPEN, collapsed, "no seed is without a collapse")


def exact(what: str, value: float, holds: bool, source: float | None = None, note: str = "") -> Evidence:
    """Judge a value without spread: a count, or the result of arithmetic."""
    return Evidence(what, source, value, None, 1, HOLDS if holds else FAILS, 0, note)


def elsewhere(what: str, source: float | None, machine: str) -> Evidence:
    """Return a statement that cannot be tested here, with a note on the machine that it needs."""
    return Evidence(what, source, None, None, 0, ELSEWHERE, 0, machine)
