"""Input and output of a simulation.

The simulation is run by `lockstep.run(job, progress)` if workers take their steps together, otherwise by `run()` of the
class that the algorithm names (`Simulation.world`). Both call `progress` from time to time with the completed fraction,
from 0 to 1. They evaluate at virtual time 0, then every `job.horizon / job.points` seconds (if workers step together:
after each further 1 / `job.points` of the steps or, without `job.steps`, of the seconds), and at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sordino.algorithms import Algorithm
from sordino.codecs import Codec
from sordino.simulate.links import Floats, Links, exact
from sordino.simulate.record import Record

Data = Literal["fashion-mnist", "digits", "none"]
LinkSharing = Literal["none", "fair"]
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Failures:
    """Failures of workers. All times are in seconds.

    Attributes:
        mtbf: mean time of work of a worker between two of its failures.
        recover: time from a failure until the failed worker works again.
        pause: time for which the other workers stop if they notice the loss and continue.
    """

    mtbf: float
    recover: float
    pause: float = 0.1


@dataclass(frozen=True)
class Goodput:
    """Useful steps per second of a run with failures, relative to the same run without failures.

    Attributes:
        restart: goodput if all workers stop until a failed worker works again; None: no worker waits for another.
        after_loss: goodput if the others continue without it meanwhile; None: the algorithm cannot continue.
        share: mean delay of the other workers when they continue, as a fraction of the pause.
    """

    restart: float | None
    after_loss: float | None
    share: float


@dataclass(frozen=True, eq=False)
class Job:
    """One run. The arguments have been checked before a job is made.

    Attributes:
        algorithm: the algorithm with its settings.
        workers: number of workers. They are numbered from 0.
        links: links of the workers.
        compute: seconds of a step by worker, float64 [workers]. Rounded so that sums are exact (see
            `sordino.simulate.links.exact`).
        message_bytes: bytes of a model when it is sent.
        steps: steps of each worker, or None.
        seconds: virtual seconds after which all workers stop, or None. Exactly one of `steps` and `seconds` is
            given.
        seed: seed of the initial parameters (the same for all workers), the order of the images, and the draws of
            peers.
        data: the data set.
        data_dir: folder of Fashion-MNIST; None: where Debian installs it.
        lr: the learning rate.
        momentum: momentum of SGD.
        batch: images per step and worker.
        dimension: dimension of the quadratic.
        load: seconds of data loading between two steps, which can hide the communication of some algorithms.
        points: number of evaluations, without the first.
        images: number of training images to use; None: all.
        channels: channels of the network's first layer. The second layer has twice, the third eight times as many.
        failures: failures of workers, for the goodput; None: no worker fails. They change no other result.
        sharing: whether simultaneous transfers share the links of their ends ("fair", see `sordino.simulate.sharing`),
            or each has the links for itself ("none", as in wan-gossip-scheduling).
        kills: (worker, virtual seconds) of each death.
        spans_until: virtual seconds up to which the record keeps the spans of all workers.
        codec: codec of the gradients, `compression=` of the workers' `DistributedOptimizer`; None: no codec.
    """

    algorithm: Algorithm
    workers: int
    links: Links
    compute: Floats
    message_bytes: float
    steps: int | None = None
    seconds: float | None = None
    seed: int = 0
    data: Data = "fashion-mnist"
    data_dir: str | None = None
    lr: float = 0.01
    momentum: float = 0.0
    batch: int = 16
    dimension: int = 8
    load: float = 0.0
    points: int = 30
    kills: tuple[tuple[int, float], ...] = ()
    spans_until: float = 0.0
    images: int | None = None
    channels: int = 16
    sharing: LinkSharing = "none"
    failures: Failures | None = None
    codec: Codec | None = None

    def __post_init__(self) -> None:
        compute = [exact(seconds) for seconds in np.broadcast_to(self.compute, self.workers).tolist()]
        object.__setattr__(self, "compute", np.array(compute))

    @property
    def horizon(self) -> float:
        """Virtual seconds of the run or, if steps are given, of the slowest worker's steps without waiting."""
        if self.seconds is not None:
            return self.seconds
        assert self.steps is not None
        return self.steps * (float(self.compute.max()) + self.load)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Result of a run.

    Attributes:
        record: the record of the workers.
        seconds: virtual seconds of the run.
        final: result of `Problem.final`.
        goodput: the goodput with failures; None: the job has no failures.
    """

    record: Record
    seconds: float
    final: dict[str, float]
    goodput: Goodput | None = None
