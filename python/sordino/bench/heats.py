"""How the results of one race with Horovod and one without are read. Ratios are always within one race.

A row (a size, or a way of zeroing gradients) holds `contestants`, timed while Horovod was not loaded, and
`beside_horovod`, empty where it was not found.
"""

from __future__ import annotations

from collections.abc import Iterable

from sordino.bench.common import Results, format_bytes

WITHOUT, BESIDE = "contestants", "beside_horovod"
LABELS = {
    "arena": "Sordino arena",
    "ordinary": "Sordino ordinary",
    "floor": "floor",
    "mpi": "MPI (sum)",
    "gloo": "Gloo",
    "horovod": "Horovod",
}


def shared_by(row: Results, *names: str) -> Results | None:
    """The race in which all of these took part, the one without Horovod first; None if there was none."""
    for heat in (WITHOUT, BESIDE):
        if all(name in row[heat] for name in names):
            found: Results = row[heat]
            return found
    return None


def ratio(row: Results, over: str, under: str) -> float | None:
    """How many times longer `over` took than `under`; None if they were not measured together."""
    race = shared_by(row, over, under)
    return None if race is None else float(race[over]["median"] / race[under]["median"])


def wrong(rows: Iterable[Results]) -> list[str]:
    """The contestants whose result was not right, and at which size."""
    return [
        f"{LABELS[name]} at {format_bytes(row['bytes'])}"
        for row in rows
        for heat in (WITHOUT, BESIDE)
        for name, one in row[heat].items()
        if not one["right"]
    ]
