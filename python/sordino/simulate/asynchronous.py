"""The algorithms in which no worker waits for another to come to some step, in virtual time."""

from __future__ import annotations

from sordino.algorithms.wide_area import ADPSGD
from sordino.errors import NotBuilt
from sordino.simulate.job import Job, Outcome, Progress


def run(job: Job, progress: Progress) -> Outcome:
    """Simulates ScheduledPull or ADPSGD.

    Raises:
        NotBuilt: SimPy is missing.
        UsageError: the data are missing, or too few for so many workers.
    """
    try:
        from sordino.simulate.averaging import Averaging
        from sordino.simulate.pulling import Pulling
    except ModuleNotFoundError as error:
        if error.name != "simpy":
            raise
        raise NotBuilt("simulations need SimPy, which is missing: pip install 'sordino[simulate]'") from error
    world = Averaging(job, progress) if isinstance(job.algorithm, ADPSGD) else Pulling(job, progress)
    return world.run()
