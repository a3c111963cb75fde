"""What a simulation is given, and what it gives back.

An engine is a function `run(job, progress) -> Outcome`: `sordino.simulate.lockstep.run` where workers take
their steps together, or what the algorithm names as its world. It calls `progress` with the part that is done, from 0
to 1, now and then. It evaluates at virtual time 0, then every `job.horizon / job.points` seconds (in lockstep: after
the first step that ends then or later), and at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sordino.algorithms import Algorithm
from sordino.simulate.links import Floats, Links, exact
from sordino.simulate.record import Record

Data = Literal["fashion-mnist", "digits", "none"]
LinkSharing = Literal["none", "fair"]
Progress = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class Job:
    """One run. All of it is checked before it is made.

    Attributes:
        algorithm: with its settings.
        workers: how many; numbered from 0.
        links: of these workers.
        compute: seconds of a step, by worker; float64 [workers]. Made exact (see `sordino.simulate.links.exact`).
        message_bytes: of a whole model, as the links see it.
        steps: of each worker; or None
        seconds: of virtual time, at the end of which all stop; or None. One of the two is given.
        seed: of the first parameters (the same for all workers), the order of the images, and the draws of peers.
        data: what is trained.
        data_dir: where Fashion-MNIST lies, if not where Debian puts it.
        lr: the learning rate.
        momentum: of SGD.
        batch: images a step and worker.
        dimension: of the quadratic.
        load: seconds of data loading between two steps, which some algorithms communicate behind.
        points: evaluations in a run, but for the one at the beginning.
        images: of the training part, that are trained on; None: all.
        channels: of the network's first layer; the second has twice, the third eight times as many.
        sharing: whether transfers at the same time share the links of their ends ("fair", see
            `sordino.simulate.sharing`), or each has them for itself ("none", as in wan-gossip-scheduling).
        kills: (worker, virtual seconds): it dies then.
        spans_until: virtual seconds up to which the record keeps what everybody does.
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

    def __post_init__(self) -> None:
        compute = [exact(seconds) for seconds in np.broadcast_to(self.compute, self.workers).tolist()]
        object.__setattr__(self, "compute", np.array(compute))

    @property
    def horizon(self) -> float:
        """Virtual seconds that the run takes or, if steps are given, would take the slowest worker without waiting."""
        if self.seconds is not None:
            return self.seconds
        assert self.steps is not None
        return self.steps * (float(self.compute.max()) + self.load)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a run has found.

    Attributes:
        record: what happened to the workers.
        seconds: of virtual time that it took.
        final: what `Problem.final` said.
    """

    record: Record
    seconds: float
    final: dict[str, float]
