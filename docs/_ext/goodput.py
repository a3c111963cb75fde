"""Goodput of algorithms whose workers fail, by the model of `sordino simulate --mtbf`: a table of docs/choosing.md."""

from __future__ import annotations

import numpy as np

from sordino.algorithms import ADPSGD, DPSGD, Algorithm, AllReduce, PushSum
from sordino.report.tables import table
from sordino.simulate.failures import goodput_of
from sordino.simulate.job import Failures, Job
from sordino.simulate.links import Links
from sordino.simulate.lockstep import messages_of

WORKERS = (64, 512, 4096)
FAILURES = Failures(mtbf=10 * 86400.0, recover=300.0, pause=10.0)
_ROWS: tuple[tuple[Algorithm, str], ...] = (
    (AllReduce(), "restart"),
    (AllReduce(), "continue"),
    (PushSum(), "continue"),
    (DPSGD(), "continue"),
    (ADPSGD(), "continue"),
)


def markdown() -> str:
    """Return the table: a row for each algorithm and way, a column for each number of workers."""
    rows = []
    for algorithm, way in _ROWS:
        cells = []
        for workers in WORKERS:
            links, compute = Links(np.full(workers, 10.0), 30e-6), np.full(workers, 0.1)
            job = Job(algorithm, workers, links, compute, 1e8, steps=1, data="none")
            found = goodput_of(job, messages_of(job), FAILURES)
            cells.append(f"{(found.restart if way == 'restart' else found.after_loss) or 0.0:.1%}")
        rows.append([f"`{algorithm.written()}`", way, *cells])
    return table(["Algorithm", "at a failure", *(f"{workers:,} workers" for workers in WORKERS)], rows)
