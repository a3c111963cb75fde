"""The algorithms in which no worker waits for another to come to some step, in virtual time.

Without data a worker of scheduled-pull takes about 10 KiB of memory and a step of it 30 to 50 microseconds, 100,000
workers with 32 steps each 2.5 minutes (benchmarks/results/wide_area_tables.md).
"""

from __future__ import annotations

import importlib.util

from sordino.algorithms.wide_area import ADPSGD, ScheduledPull
from sordino.errors import NotBuilt, UsageError
from sordino.simulate.job import Job, Outcome, Progress


def check(job: Job) -> None:
    """What makes a job impossible, before it is run.

    Raises:
        UsageError: a setting would have no effect. NotBuilt: SimPy is missing.
    """
    algorithm = job.algorithm
    assert isinstance(algorithm, (ScheduledPull, ADPSGD))
    if importlib.util.find_spec("simpy") is None:
        raise NotBuilt("this simulation needs SimPy, which is missing: pip install 'sordino[simulate]'")
    if algorithm.buffers != "local":
        raise UsageError(f"--set buffers={algorithm.buffers}: the simulated models have no buffers; leave it out")
    if isinstance(algorithm, ScheduledPull) and algorithm.managed and algorithm.manager >= job.workers:
        raise UsageError(f"--set manager={algorithm.manager}: must be a worker, from 0 to {job.workers - 1}")
    if job.load:
        raise UsageError(f"--load-ms {1e3 * job.load:g}: is for algorithms whose workers step together; leave it out")


def run(job: Job, progress: Progress) -> Outcome:
    """Simulates ScheduledPull or ADPSGD.

    Raises:
        UsageError: see `check`; or the data are missing, or too few for so many workers. NotBuilt: SimPy is missing.
    """
    check(job)
    from sordino.simulate.averaging import Averaging
    from sordino.simulate.pulling import Pulling

    world = Averaging(job, progress) if isinstance(job.algorithm, ADPSGD) else Pulling(job, progress)
    return world.run()
