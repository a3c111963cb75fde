"""Scheduled pull gossip: workers average with copies of each other's parameters.

The copies are on their way while the workers compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sordino.algorithms.asynchronous import Asynchronous
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.scheduled_pull.manager import Manager
from sordino.algorithms.scheduled_pull.negotiation import Autonomous, Managed
from sordino.algorithms.scheduled_pull.schedule import PullAfter, PullFirst, Schedule
from sordino.algorithms.traffic import Model, Traffic
from sordino.errors import UsageError


@dataclass(frozen=True)
class ScheduledPull(Asynchronous):
    """Scheduled pull gossip: every `interval` steps each worker averages with a copy of one other's parameters.

    These steps are a window, after which w_i = (w_i + w_j) / 2; the copy is pulled beside the steps. Nobody waits for
    anybody: a worker is pulled from without its doing anything.

    overlap: "none" pulls when the window has ended, and waits for it; "naive" begins to pull when the window begins, so
    that the copy is old when it is used; "scheduled" begins as late as it can so that the pull ends with the window.
    For that it predicts when the window ends, from the steps so far, and what the pull takes, from those before between
    the two. A worker is pulled from by one other at a time: with schedule="manager" rank `manager` knows who is free
    and what transfers take, in a thread of its own that carries no models; with "autonomous" workers agree among
    themselves. When the manager is gone, all go on autonomously, after a warning.

    Sent per window and worker: the bytes of the parameters (on average; as the one pulled from), one message, and a few
    of some bytes for the scheduling; within a node only the latter. Staleness: what a pull takes, or a window
    ("naive"). Memory: the parameters four times (three snapshots, so that one is whole and still while another is made,
    and what was pulled). When a peer dies: it is not pulled from any more, and the others train on; collective
    operations that need it raise `PeerLost`.
    Source: Oguni and Shudo, "Communication scheduling for wide-area deep learning" (in Japanese), Algorithms 1 and 2.
    `docs/design.md` says where this differs.

    Attributes:
        overlap: "none", "naive" or "scheduled".
        schedule: who schedules with overlap="scheduled": "manager" or "autonomous".
        threshold: a transfer that took longer or shorter than estimated by this share of the estimate replaces it;
            others move it half the way.
        manager: the rank whose service thread is the manager.
        patience: seconds after which a pull, or a question, that got no answer is given up, and its peer counts as gone
            until it is heard of.
    """

    interval: int = 16
    overlap: Literal["none", "naive", "scheduled"] = "scheduled"
    schedule: Literal["manager", "autonomous"] = "autonomous"
    threshold: float = 0.1
    manager: int = 0
    patience: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = self.overlap in ("none", "naive", "scheduled")
        require(fine, self, "overlap", "must be 'none', 'naive' or 'scheduled'")
        require(self.schedule in ("manager", "autonomous"), self, "schedule", "must be 'manager' or 'autonomous'")
        require(0 <= self.threshold < 1, self, "threshold", "must be at least 0 and below 1")
        require(isinstance(self.manager, int) and self.manager >= 0, self, "manager", "must be a rank")
        require(self.patience > 0, self, "patience", "must be above 0")

    steps = "sordino.algorithms.scheduled_pull.strategy:PullStrategy"
    simulation = Simulation(
        world="sordino.simulate.pulling:Pulling",
        refused={"buffers": NO_BUFFERS},
        modes={
            "no overlap": ("overlap=none",),
            "naive overlap": ("overlap=naive",),
            "scheduled, manager": ("overlap=scheduled", "schedule=manager"),
            "scheduled, autonomous": ("overlap=scheduled", "schedule=autonomous"),
        },
    )

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        return self._exchanges(model, nodes, ways=1, copied=2, hidden=self.overlap != "none")

    def fitted(self, before: Sequence[int], now: Sequence[int]) -> ScheduledPull:
        if not self.managed:
            return self
        manager = before[self.manager]
        return replace(self, manager=now.index(manager) if manager in now else 0)

    def check_simulation(self, workers: int) -> None:
        if self.managed and self.manager >= workers:
            raise UsageError(f"--set manager={self.manager}: must be a worker, from 0 to {workers - 1}")

    @property
    def managed(self) -> bool:
        """Whether there is a manager."""
        return self.overlap == "scheduled" and self.schedule == "manager"

    def schedule_of(self, rank: int, size: int) -> Schedule:
        """Return what decides for worker `rank` of `size`."""
        if self.overlap == "none":
            return PullAfter(rank, size, self.seed)
        if self.overlap == "naive":
            return PullFirst(rank, size, self.seed)
        if self.managed:
            return Managed(rank, size, self.seed, self.threshold, self.patience, self.manager)
        return Autonomous(rank, size, self.seed, self.threshold, self.patience)

    def manager_of(self, size: int) -> Manager:
        """Return what decides for all of `size` workers where there is a manager."""
        return Manager(size, self.seed, self.threshold)
