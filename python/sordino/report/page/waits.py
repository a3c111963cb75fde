"""Waits of ranks for each other, in the steps whose spans were recorded.

A wait counts for the rank that was the last to begin an operation in flight, or whose part of the operation was the
last to arrive. If neither is known, the data were in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from sordino.record.reading import Rank, Run
from sordino.report.page.series import fold

_MOST_SPANS = 6000  # per window in the page
_APART = 4  # steps between two lines of spans that belong to different windows

Span = list[Any]
"""Kind, begin and end (seconds), peer or -1, bytes, name."""


def attributed(spans: Sequence[Span], rank: int) -> Iterator[tuple[float, float, int]]:
    """Yield the parts of a rank's waits: begin and end in seconds, and the awaited rank; -1 if data were in flight."""
    reasons = sorted(
        (span[1], span[2], span[3]) for span in spans if span[0] in ("meet", "move") and span[3] not in (-1, rank)
    )
    begins = [begin for begin, _, _ in reasons]
    longest = max((end - begin for begin, end, _ in reasons), default=0.0)
    for what, begin, end, *_ in spans:
        if what != "wait":
            continue
        near = reasons[bisect_left(begins, begin - longest) : bisect_left(begins, end)]
        over = [reason for reason in near if reason[1] > begin]
        cuts = sorted({begin, end, *(cut for one in over for cut in one[:2] if begin < cut < end)})
        for since, until in pairwise(cuts):
            here = [one for one in over if one[0] <= since and one[1] >= until]
            yield since, until, min(here, key=lambda one: one[1])[2] if here else -1


def windows(run: Run, zero: float) -> list[dict[str, Any]]:
    """Return the activities of each rank in each series of steps whose spans were recorded.

    Each rank has a row of [kind, begin, end, peer], in seconds since the window began. Kinds are "wait" (for peer),
    "move" (data in flight), "pull" and "average" (with peer), "besides" (outside of steps), and "compute" if the record
    has it. Otherwise computation is the time that remains.
    """
    if run.what != "simulation":
        return [_window(rows, zero) for rows in _by_steps(run)]
    # The workers of a simulation are at different steps at one time, and each has one line.
    rows = {number: lines for number, rank in sorted(run.ranks.items()) if (lines := list(rank.of("spans")))}
    if not rows:
        return []
    found = _window(rows, zero)
    return [found | {"label": f"the first {found['seconds']:.3g} virtual s"}]


def _by_steps(run: Run) -> list[dict[int, list[Any]]]:
    """Return the lines of spans by rank for each series of steps. A rank that joined later lacks the first series."""
    parts = [(number, lines) for number, rank in run.ranks.items() for lines in _cut(rank)]
    found: list[dict[int, list[Any]]] = []
    before, last = None, 0
    for number, lines in sorted(parts, key=lambda part: (part[1][0]["start"], part[1][0]["step"], part[0])):
        start, first = lines[0]["start"], lines[0]["step"]
        if start != before or first > last or number in found[-1]:
            found.append({})
            before, last = start, 0
        found[-1][number] = lines
        last = max(last, lines[-1]["step"])
    return [dict(sorted(rows.items())) for rows in found]


def _cut(rank: Rank) -> list[list[Any]]:
    """Return a rank's lines of spans, cut where steps without spans lie between them."""
    parts: list[list[Any]] = []
    before: tuple[int, int] | None = None
    for line in rank.of("spans"):
        place = (line["start"], line["step"])
        if before is None or place[0] != before[0] or place[1] - before[1] > _APART:
            parts.append([])
        parts[-1].append(line)
        before = place
    return parts


def _window(rows: dict[int, list[Any]], zero: float) -> dict[str, Any]:
    shown: list[dict[str, Any]] = []
    room = _MOST_SPANS // max(len(rows), 1)
    for number, lines in rows.items():
        spans = [span for line in lines for span in line["spans"]]
        waits = [["wait", begin, end, peer] for begin, end, peer in attributed(spans, number) if end > begin]
        others = [span[:4] for span in spans if span[0] in ("move", "pull", "average", "compute", "besides")]
        found = sorted(waits + others, key=lambda span: span[1])
        shown.append({"rank": number, "spans": found[:room], "left": max(0, len(found) - room)})
    steps = [line["step"] for lines in rows.values() for line in lines]
    every = [span for row in shown for span in row["spans"]]
    begin = min((span[1] for span in every), default=zero)
    end = max((span[2] for span in every), default=zero)
    for row in shown:
        row["spans"] = [
            [what, round(since - begin, 7), round(until - begin, 7), peer] for what, since, until, peer in row["spans"]
        ]
    return {
        "first": max(0, min(steps) - 1),
        "last": max(steps),
        "time": begin - zero,
        "seconds": end - begin,
        "rows": shown,
    }


def matrix(run: Run) -> dict[str, Any]:
    """Return the seconds that each rank has waited for each other rank, in the steps whose spans were recorded."""
    numbers = sorted(run.ranks)
    place = {number: index for index, number in enumerate(numbers)}
    table = [[0.0] * len(numbers) for _ in numbers]
    data = [0.0] * len(numbers)
    for number, rank in run.ranks.items():
        spans = [span for line in rank.of("spans") for span in line["spans"]]
        for begin, end, peer in attributed(spans, number):
            if peer in place:
                table[place[number]][place[peer]] += end - begin
            else:
                data[place[number]] += end - begin
    labels, folded = fold(numbers, table)
    return {"ranks": labels, "seconds": folded, "data": data if len(labels) == len(numbers) else None}
