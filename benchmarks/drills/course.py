"""What the log of a disturbed training's steps tells: when it went on after each kill, and what it took again."""

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
    """One step: its number, how many ranks took it, in which start of the job, and when (seconds since the epoch)."""

    step: int
    ranks: int
    start: int
    time: float


def lines_of(path: Path) -> tuple[list[Line], int]:
    """The steps of a log in the order in which they were taken, and how many lines a kill has cut short."""
    lines, torn = [], 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            found = json.loads(text)
            lines.append(Line(found["step"], found["ranks"], found["start"], found["time"]))
        except (ValueError, LookupError, TypeError, RecursionError):
            torn += 1
    return lines, torn


def told(kills: Sequence[Kill], lines: Sequence[Line], begun: float) -> list[Results]:
    """Each kill with what followed. The first step without those killed is of a later start, or the second one after
    the last before them: one may have been under way, and had all it needed from them."""
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
                "after_step": reached or None,  # None: the start had taken none
                "outlived": not ended,
                "seconds_to_go_on": on and on.time - kill.time,
                "steps_repeated": on and (max(max(before, default=0) - on.step + 1, 0) if ended else 0),
                "ranks_after": on and on.ranks,
            }
        )
    return found


def course(lines: Sequence[Line], begun: float) -> list[list[float]]:
    """Seconds and step, of some lines: the first and last of each start, and enough between for a picture."""
    stride = max(1, len(lines) // _POINTS)
    edges = {k for k in range(1, len(lines)) if lines[k].start != lines[k - 1].start}
    chosen = sorted({*range(0, len(lines), stride), *edges, *(k - 1 for k in edges), len(lines) - 1} - {-1})
    return [[round(lines[k].time - begun, 3), lines[k].step] for k in chosen]
