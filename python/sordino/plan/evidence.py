"""Losses that `sordino plan` cites when it recommends an algorithm: results of benchmarks/frontier.py.

The file losses.json has a part of these results (docs/make_pages.py writes it).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from sordino.algorithms import Algorithm

_SCALES = re.compile(r"(interval|group_size)=(\d+)(?:, )?")


class Loss(NamedTuple):
    """Loss of a training with an algorithm.

    Attributes:
        written: the algorithm as Python source.
        percent: difference from the loss with AllReduce, in % of the latter.
        error: standard error of `percent`.
    """

    written: str
    percent: float
    error: float


def losses() -> tuple[str, list[Loss]]:
    """Return a description of the training, and the losses."""
    read = json.loads((files("sordino.plan") / "losses.json").read_text())
    return read["training"], [Loss(*row) for row in read["losses"]]


def nearest(algorithm: Algorithm, found: Sequence[Loss]) -> Loss | None:
    """Return the loss of the same algorithm with the nearest interval, or None.

    The same algorithm has equal settings, apart from the interval and the size of its groups, and both have groups of
    several workers or neither has.
    """
    kind, interval = _parts(algorithm.written())
    same = [one for one in found if _parts(one.written)[0] == kind]
    return min(same, key=lambda one: abs(math.log(_parts(one.written)[1] / interval)), default=None)


def sentence(algorithm: Algorithm) -> str:
    """Return a sentence about the loss of an algorithm in the benchmark."""
    training, found = losses()
    one = nearest(algorithm, found)
    if one is None:
        return f"Its loss is not known: {training} was not tried with it."
    side = "above" if one.percent >= 0 else "below"
    return (
        f"In {training}, the loss of {one.written} was {abs(one.percent):.1f} ± {one.error:.1f} % {side} AllReduce's."
    )


def _parts(written: str) -> tuple[tuple[str, bool], int]:
    """Return an algorithm without interval and size of groups, and whether it has groups; and the interval, or 1."""
    scales = {name: int(value) for name, value in _SCALES.findall(written)}
    rest = _SCALES.sub("", written).replace(", )", ")")
    return (rest, scales.get("group_size", 1) > 1), scales.get("interval", 1)
