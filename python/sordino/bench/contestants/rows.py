"""Rows of the benchmark of collectives: from the times of jobs to medians, spreads and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sordino.bench.contestants.operations import elements
from sordino.report import Results
from sordino.timing import summarize

MPIS = ("openmpi", "mpich", "intelmpi")
PEERS = (*MPIS, "gloo", "horovod")
OURS = ("ordinary", "arena", "asynchronous", "distributed", "over_mpi")
_BIMODAL = 1.5


def rows_to_measure(operations: Sequence[str], sizes: Sequence[int], ranks: int) -> list[tuple[str, int]]:
    """Return operation and size of each row.

    A barrier has one row, with size 0. Sizes without elements are left out.
    """
    rows = []
    for operation in operations:
        found = [0] if operation == "barrier" else sizes
        rows += [(operation, size) for size in found if size == 0 or elements(operation, size, ranks)[0] > 0]
    return rows


def combine(jobs: Mapping[str, Sequence[Results]]) -> list[Results]:
    """Return one row per operation and size, with the times of each contestant.

    `jobs` has the results of the jobs of each contestant. A contestant's median is the median over jobs of the job
    medians, which are under "jobs". "average", "fastest" and "slowest" are over ranks, of each rank's mean time.
    """
    rows: dict[tuple[str, int], Results] = {}
    for name, ended in jobs.items():
        for measured in zip(*(job["rows"] for job in ended)):
            first = measured[0]
            key = first["operation"], first["bytes"]
            row = rows.setdefault(key, {"operation": key[0], "bytes": key[1], "contestants": {}})
            medians = np.array([one["slowest"] for one in measured])
            means = np.array([one["of_ranks"] for one in measured])
            of_ranks = {"average": means.mean(axis=1), "fastest": means.min(axis=1), "slowest": means.max(axis=1)}
            row["contestants"][name] = summarize(medians) | {
                "most": float(medians.max()),
                "jobs": medians.tolist(),
                "calls": sum(one["calls"] for one in measured),
                "right": all(one["right"] for one in measured),
                **{part: float(np.median(values)) for part, values in of_ranks.items()},
            }
    return list(rows.values())


def best(row: Results, names: Sequence[str] = PEERS) -> str | None:
    """Return the fastest of these contestants in a row; None if none was measured."""
    found = [name for name in names if name in row["contestants"]]
    return min(found, key=lambda name: row["contestants"][name]["median"], default=None)


def ratio_to_best(row: Results, ours: str, names: Sequence[str] = PEERS) -> tuple[float, str] | None:
    """Return the time of the fastest of these contestants over ours, and its name; None if one was not measured."""
    peer = best(row, names)
    if peer is None or ours not in row["contestants"]:
        return None
    return row["contestants"][peer]["median"] / row["contestants"][ours]["median"], peer


def bimodal(rows: Sequence[Results]) -> list[tuple[Results, str]]:
    """Return each row and contestant whose job medians differ by more than 1.5 times."""
    return [
        (row, name)
        for row in rows
        for name, entry in row["contestants"].items()
        if entry["most"] > _BIMODAL * entry["least"]
    ]


def wrong(rows: Sequence[Results]) -> list[str]:
    """Return contestant, operation and size of wrong results."""
    return [
        f"{name}: {row['operation']} of {row['bytes']} B"
        for row in rows
        for name, entry in row["contestants"].items()
        if not entry["right"]
    ]
