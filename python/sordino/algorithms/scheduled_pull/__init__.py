"""Scheduled pull gossip: workers average with copies of peers' parameters, which are pulled while they compute."""

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
    """Scheduled pull gossip: every `interval` steps each worker averages with a copy of one peer's parameters.

    These steps are a window, after which w_i = (w_i + w_j) / 2. With overlap, the copy is pulled during the steps. No
    worker waits for the steps of another, and pulling from a worker needs no action of its training thread.

    overlap: "none" pulls after the window has ended, and waits; "naive" starts to pull when the window begins, so the
    copy is old when it is used; "scheduled" starts as late as possible, so that the pull ends with the window. For
    that it predicts the end of the window from earlier windows, and the duration of the pull from earlier pulls between
    the two workers. With "scheduled", at most one worker pulls from a given worker at a time: with schedule="manager"
    rank `manager` tracks free workers and transfer times, in a service thread through which no models pass; with
    "autonomous" workers agree among themselves. When the manager is lost, all continue autonomously, after a warning.

    Sent per window and worker: its parameters to each worker that pulls them, on average one, in one message each; and
    a few messages of some bytes for the scheduling. Within a node only the latter are sent. Staleness: the duration of
    a pull, or of a window ("naive"). Memory: the parameters four times (three snapshots: the newest, one that is on its
    way to another node, and the next one; and the pulled copy). When a peer dies: it is not pulled from any more, and
    the remaining workers train on; collective operations that need it raise `PeerLost`.
    Source: Oguni and Shudo, "Communication scheduling for wide-area deep learning" (in Japanese), Algorithms 1 and 2.
    `docs/design/asynchronous-algorithms.md` lists the differences.

    Attributes:
        overlap: "none", "naive" or "scheduled".
        schedule: the scheduler for overlap="scheduled": "manager" or "autonomous".
        threshold: a measured transfer time that differs from the estimate by at least this fraction replaces it;
            otherwise the estimate moves half the way.
        manager: the rank whose service thread is the manager. If it is lost, the first rank, when all meet again.
        patience: seconds after which a pull or a question without an answer is given up. Its peer then counts as gone
            until it sends a message.
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
        require(self.manager >= 0, self, "manager", "must be a rank")
        require(self.patience > 0, self, "patience", "must be above 0")

    steps = "sordino.algorithms.scheduled_pull.strategy:PullStrategy"
    simulation = Simulation(
        world="pulling",
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
        """Return the schedule of worker `rank` of `size`."""
        if self.overlap == "none":
            return PullAfter(rank, size, self.seed)
        if self.overlap == "naive":
            return PullFirst(rank, size, self.seed)
        if self.managed:
            return Managed(rank, size, self.seed, self.threshold, self.patience, self.manager)
        return Autonomous(rank, size, self.seed, self.threshold, self.patience)

    def manager_of(self, size: int) -> Manager:
        """Return the manager of `size` workers."""
        return Manager(size, self.seed, self.threshold)
