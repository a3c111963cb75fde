"""Course of a disturbed training, from its log of steps: continuation after each kill, and repeated steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drills.job import Kill
from sordino.report import Results

_POINTS = 400


@dataclass(frozen=True)
class Line:
    """One step: its number, the number of ranks that took it, the job's restarts before it, and the time (Unix)."""

    step: int
    ranks: int
    start: int
    time: float


def lines_of(path: Path) -> tuple[list[Line], int]:
    """Return the steps of a log in order, and the number of lines that a kill has cut off."""
    lines, torn = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found = json.loads(text)
            lines.append(Line(found["step"], found["ranks"], found["start"], found["time"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            torn += 1
    return lines, torn


def told(kills: Sequence[Kill], lines: Sequence[Line], begun: float) -> list[Results]:
    """Return each kill with its consequences.

    The first step without the killed ranks is the first of a later start, or the second after the last step before the
    kill: the step in between may already have had everything that it needed from the killed ranks.
    """
    found = []
    for kill in kills:
        reached = max((line.step for line in lines if line.time < kill.time and line.start == kill.start), default=0)
        ahead = [line for line in lines if line.time >= kill.time]
        on = next((one for one in ahead if one.start > kill.start or one.step >= reached + 2), None)
        ended = on is None or on.start > kill.start
        before = [line.step for line in lines if line.start <= kill.start]
        found.append(
            {
                "at": kill.time - begun,
                "ranks": list(kill.ranks),
                "alive": kill.alive,
                "start": kill.start,
                "after_step": reached or None,  # None: this start had taken no step
                "outlived": not ended,
                "seconds_to_go_on": on and on.time - kill.time,
                "steps_repeated": on and (max(max(before, default=0) - on.step + 1, 0) if ended else 0),
                "ranks_after": on and on.ranks,
            }
        )
    return found


def course(lines: Sequence[Line], begun: float) -> list[list[float]]:
    """Return [seconds, step] of some lines: the first and last of each start, and enough in between for a plot."""
    stride = max(1, len(lines) // _POINTS)
    edges = {k for k in range(1, len(lines)) if lines[k].start != lines[k - 1].start}
    chosen = sorted({*range(0, len(lines), stride), *edges, *(k - 1 for k in edges), len(lines) - 1} - {-1})
    return [[round(lines[k].time - begun, 3), lines[k].step] for k in chosen]
