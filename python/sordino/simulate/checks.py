"""Checks of a job. A setting that would have no effect in a simulation is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import fields

from sordino.errors import NotBuilt, UsageError
from sordino.simulate.job import Job

_MOST_SHARING = 256  # workers with shared links
_MOST_THREADS = 256  # workers that are threads with the real optimizer


def check(job: Job) -> None:
    """Check a job before it runs.

    Raises:
        UsageError: a setting would have no effect in a simulation. NotBuilt: SimPy is missing.
    """
    algorithm, simulation, name = job.algorithm, job.algorithm.simulation, job.algorithm.label
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if value == field.default:
            continue
        if field.name in simulation.refused:
            raise UsageError(f"{name}({field.name}={value!r}) cannot be simulated: {simulation.refused[field.name]}")
        if job.data == "none" and simulation.arrays is not None and field.name not in simulation.imitated:
            raise UsageError(
                f"{name}({field.name}={value!r}) cannot be simulated without data; omit it, or give data "
                "(--data digits)"
            )
    if job.codec is not None:
        _check_codec(job)
    algorithm.check_simulation(job.workers)
    if algorithm.traits.synchronous:
        _check_steps(job)
    else:
        _check_events(job)


def _check_codec(job: Job) -> None:
    """Check a job whose gradients are sent with a codec."""
    if job.data == "none":
        raise UsageError(f"--compression {job.codec}: cannot be simulated without data (--data digits)")
    traits = job.algorithm.traits
    if not (traits.synchronous and traits.sends_gradients):
        raise UsageError(
            f"--compression {job.codec}: has no effect, because {job.algorithm.label} sends no gradients. If it has a "
            "setting compression, use --set compression=..."
        )


def _check_steps(job: Job) -> None:
    """Check a job whose workers take their steps together."""
    name = job.algorithm.label
    if job.kills:
        raise UsageError(
            f"--kill {job.kills[0][0]}@{job.kills[0][1]:g}: with {name} all workers stop when one dies; only those of "
            "scheduled-pull and adpsgd continue"
        )
    if job.sharing != "none":
        raise UsageError(
            f"--sharing {job.sharing}: needs scheduled-pull or adpsgd. The workers of {name} step together, so a link "
            "carries one transfer at a time in each direction"
        )
    threads = job.data == "none" and job.algorithm.simulation.arrays is None
    if threads and job.workers > _MOST_THREADS:
        raise UsageError(
            f"--workers {job.workers}: {name} is simulated by the real optimizer, with a thread per worker and a limit "
            f"of {_MOST_THREADS}. Give fewer workers, or define `simulation.arrays` of the algorithm"
        )


def _check_events(job: Job) -> None:
    """Check a job whose workers do not wait for each other."""
    if job.algorithm.simulation.world is None:
        raise UsageError(f"{job.algorithm.label} cannot be simulated: its `simulation` names no world")
    if importlib.util.find_spec("simpy") is None:
        raise NotBuilt("this simulation needs SimPy, which is missing: pip install 'sordino[simulate]'")
    if job.sharing == "fair" and job.workers > _MOST_SHARING:
        raise UsageError(
            f"--sharing fair: the limit is {_MOST_SHARING} workers, not {job.workers}: the rates of all transfers are "
            "computed again whenever a transfer begins or ends"
        )
    _check_kills(job)
    if job.load:
        raise UsageError(f"--load-ms {1e3 * job.load:g}: needs an algorithm whose workers step together; omit it")


def _check_kills(job: Job) -> None:
    """Check the deaths of workers that do not wait for each other."""
    if len(job.kills) == job.workers:
        raise UsageError("--kill: kills all workers; at least one must stay, to train and to be evaluated")
    for worker, seconds in job.kills:
        if job.seconds is not None and seconds > job.seconds:
            raise UsageError(f"--kill {worker}@{seconds:g}: has no effect, because the run ends at {job.seconds:g} s")
