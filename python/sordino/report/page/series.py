"""Series over a run: metrics, durations of steps, ages of averaged models, and skipped parameters.

A curve has at most a few hundred points for any length of run: mean, minimum and maximum of each interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from sordino.record.reading import Line, Rank, Run

_POINTS = 400
_TENSORS = 64  # rows of a skip map, the largest tensors
_RANKS = 64  # rows of a matrix


def kept(rank: Rank, kind: str) -> list[Line]:
    """Return the lines of a kind, without lines of steps that were repeated after a restart.

    A line of metrics without values marks the step after which a script continues. That step itself is not repeated.
    """
    lines = rank.of(kind)
    first: dict[int, int] = {}  # first step that each start repeated
    for line in lines:
        first.setdefault(line["start"], line["step"] + 1 if line.get("values") == {} else line["step"])
    starts = sorted(first)
    return [line for line in lines if all(line["step"] < first[later] for later in starts if later > line["start"])]


class _Stretches:
    """Division of steps into intervals of equal length.

    Args:
        steps: the steps, whose minimum and maximum are the ends.
    """

    def __init__(self, steps: Iterable[float]) -> None:
        steps = list(steps)
        self.low, self.high = min(steps, default=0.0), max(steps, default=0.0)
        self.width = max((self.high - self.low) / _POINTS, 1e-12)

    def __call__(self, step: float) -> int:
        return min(int((step - self.low) / self.width), _POINTS - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def hidden_of(line: Line) -> float:
    """Return the seconds in which communication was in flight while the rank did something else."""
    return max(0.0, float(line["busy"]) - float(line["exposed"]))


def metrics(run: Run, zero: float) -> dict[str, Any]:
    """Return the metrics that users have recorded, by name: mean, minimum and maximum over ranks, by step."""
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for rank in run.ranks.values():
        for line in kept(rank, "metrics"):
            for name, value in line["values"].items():
                if value is not None:
                    found[name].append((line["step"], line["time"] - zero, value))
    result = {}
    for name, points in found.items():
        along = 0 if all(step is not None for step, _, _ in points) else 1  # a simulation has only virtual time
        stretch = _Stretches(point[along] for point in points)
        parts: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        for point in points:
            parts[stretch(point[along])].append(point)
        rows = [parts[part] for part in sorted(parts)]
        result[name] = {
            "step": [_mean([step for step, _, _ in row]) for row in rows] if along == 0 else [],
            "time": [_mean([time for _, time, _ in row]) for row in rows],
            "mean": [_mean([value for _, _, value in row]) for row in rows],
            "low": [min(value for _, _, value in row) for row in rows],
            "high": [max(value for _, _, value in row) for row in rows],
        }
    return result


def _along(run: Run) -> str:
    """Return the key by which lines are ordered: workers of a simulation are at different steps at one time."""
    return "time" if run.what == "simulation" else "step"


def steps(run: Run, zero: float) -> dict[str, list[float]]:
    """Return mean seconds of a step over ranks: exposed communication, hidden communication, and the rest.

    "hidden" is empty if it is not known, as in simulations. "bytes" are the bytes that a rank sent in a step.
    """
    lines = [line for rank in run.ranks.values() for line in kept(rank, "step")]
    along = _along(run)
    stretch = _Stretches(line[along] for line in lines)
    parts: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        parts[stretch(line[along])].append(line)
    names = ("step", "time", "other", "exposed", "hidden", "bytes")
    result: dict[str, list[float]] = {name: [] for name in names}
    for part in sorted(parts):
        row = parts[part]
        count = sum(line["steps"] for line in row)
        exposed = sum(line["exposed"] for line in row)
        result["step"].append(_mean([line["step"] for line in row]))
        result["time"].append(_mean([line["time"] for line in row]) - zero)
        result["other"].append(max(0.0, sum(line["seconds"] for line in row) - exposed) / count)
        result["exposed"].append(exposed / count)
        if all(line["busy"] is not None for line in lines):
            result["hidden"].append(sum(hidden_of(line) for line in row) / count)
        result["bytes"].append(sum(sum(line["sent"].values()) for line in row) / count)
    return result


def links(run: Run) -> dict[str, Any]:
    """Return the bytes that each rank has sent to each rank and each helper. A helper has no model and no record."""
    sent: dict[int, dict[str, float]] = {number: defaultdict(float) for number in sorted(run.ranks)}
    for number, rank in run.ranks.items():
        for line in rank.of("besides") + rank.of("step"):
            for peer, count in line["sent"].items():
                sent[number][peer] += count
    helpers = sorted({peer for row in sent.values() for peer in row if not peer.isdigit()})
    numbers = list(sent)
    table = [[row.get(str(peer), 0.0) for peer in numbers] for row in sent.values()]
    labels, folded = fold(numbers, table)
    if len(labels) == len(numbers):
        folded = [[*row, *(sent[number].get(one, 0.0) for one in helpers)] for number, row in zip(numbers, folded)]
    return {"ranks": labels, "columns": [*labels, *helpers], "bytes": folded}


def fold(ranks: Sequence[int], table: Sequence[Sequence[float]]) -> tuple[list[str], list[list[float]]]:
    """Return a table of ranks by ranks, with adjacent ranks combined if it has more rows than a page can show."""
    width = -(-len(ranks) // _RANKS)
    parts = [range(first, min(first + width, len(ranks))) for first in range(0, len(ranks), max(width, 1))]
    labels = [str(ranks[part[0]]) if len(part) == 1 else f"{ranks[part[0]]}–{ranks[part[-1]]}" for part in parts]
    return labels, [
        [sum(table[row][column] for row in rows for column in columns) for columns in parts] for rows in parts
    ]


def ages(run: Run, zero: float) -> dict[str, list[float]]:
    """Return the ages of averaged models, in seconds and in steps, over the steps.

    "behind", the age in steps, is empty if it is not known, as in simulations.
    """
    along = _along(run)
    points = [
        (line["step"], line["time"] - zero, *pull[:2])
        for rank in run.ranks.values()
        for line in kept(rank, "ages")
        for pull in line["pulls"]
        if pull[0] is not None
    ]
    place = ("step", "time").index(along)
    stretch = _Stretches(point[place] for point in points)
    parts: dict[int, list[tuple[float, float, float, float | None]]] = defaultdict(list)
    for point in points:
        parts[stretch(point[place])].append(point)
    rows = [parts[part] for part in sorted(parts)]
    known = [[behind for *_, behind in row if behind is not None] for row in rows]
    return {
        "step": [_mean([step for step, *_ in row]) for row in rows],
        "time": [_mean([time for _, time, *_ in row]) for row in rows],
        "mean": [_mean([age for _, _, age, _ in row]) for row in rows],
        "low": [min(age for _, _, age, _ in row) for row in rows],
        "high": [max(age for _, _, age, _ in row) for row in rows],
        "behind": [_mean(row or [0]) for row in known] if any(known) else [],
    }


def skips(run: Run) -> dict[str, Any]:
    """Return the skipped fraction of each tensor by point, of the first rank that has recorded it."""
    for _, rank in sorted(run.ranks.items()):
        lines = kept(rank, "skips")
        # Each line has its own names, because tensors may be unfrozen or added.
        by_name = [({name: at for at, name in enumerate(line["names"])}, line["points"]) for line in lines]
        found = [(places, point) for places, points in by_name for point in points if point["skipped"]]
        if not found:
            continue
        names, sizes = lines[-1]["names"], lines[-1]["bytes"]
        found = found[:: max(1, -(-len(found) // _POINTS))]
        points = [point for _, point in found]
        chosen = sorted(sorted(range(len(names)), key=lambda index: -sizes[index])[:_TENSORS])
        return {
            "rank": rank.rank,
            "names": [names[index] for index in chosen],
            "bytes": [sizes[index] for index in chosen],
            "left": len(names) - len(chosen),
            "step": [point["step"] for point in points],
            "skipped": [[_at(point["skipped"], at.get(names[one])) for at, point in found] for one in chosen],
            "unchanged": [[_at(point["ratios"], at.get(names[one])) for at, point in found] for one in chosen],
            "threshold": [point["threshold"] for point in points],
            "sent": [point["bytes_sent"] for point in points],
            "unskipped": [point["bytes_unskipped"] for point in points],
        }
    return {}


def _at(values: Sequence[float | None], index: int | None) -> float | None:
    return values[index] if index is not None and index < len(values) else None
