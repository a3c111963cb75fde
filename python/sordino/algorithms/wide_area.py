"""Gossip in which no worker waits for another to come to some step: for slow links, and nodes that differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sordino.algorithms.gossip import Buffers, require
from sordino.algorithms.pairing import Pairing
from sordino.algorithms.pull_manager import Manager
from sordino.algorithms.pull_negotiation import Autonomous, Managed
from sordino.algorithms.pull_schedule import PullAfter, PullFirst, Schedule


@dataclass(frozen=True)
class _Asynchronous:
    """What the algorithms here are told.

    Attributes:
        interval: optimizer steps from one averaging to the next.
        seed: of the draws of peers; the same on all ranks.
        buffers: "average" averages the floating-point buffers given as `named_buffers` along with the parameters,
            "local" leaves every worker its own.
    """

    interval: int = 1
    seed: int = 0
    buffers: Buffers = "local"

    def __post_init__(self) -> None:
        require(isinstance(self.interval, int) and self.interval >= 1, self, "interval", "must be at least 1")
        require(isinstance(self.seed, int) and 0 <= self.seed < 1 << 64, self, "seed", "must be from 0 to 2^64 - 1")
        require(self.buffers in ("local", "average"), self, "buffers", "must be 'local' or 'average'")

    @property
    def workers_in_group(self) -> int:
        """Neighbouring ranks that train as one worker: never more than one."""
        return 1


@dataclass(frozen=True)
class ScheduledPull(_Asynchronous):
    """Scheduled pull gossip: every `interval` steps (a window) each worker averages its parameters with a copy of one
    other worker's, w_i = (w_i + w_j) / 2, which it pulls beside the steps. Nobody waits for anybody: a worker is pulled
    from without its doing anything.

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

    @property
    def managed(self) -> bool:
        """Whether there is a manager."""
        return self.overlap == "scheduled" and self.schedule == "manager"

    def schedule_of(self, rank: int, size: int) -> Schedule:
        """What decides for worker `rank` of `size`."""
        if self.overlap == "none":
            return PullAfter(rank, size, self.seed)
        if self.overlap == "naive":
            return PullFirst(rank, size, self.seed)
        if self.managed:
            return Managed(rank, size, self.seed, self.threshold, self.patience, self.manager)
        return Autonomous(rank, size, self.seed, self.threshold, self.patience)

    def manager_of(self, size: int) -> Manager:
        """What decides for all of `size` workers where there is a manager."""
        return Manager(size, self.seed, self.threshold)


@dataclass(frozen=True)
class ADPSGD(_Asynchronous):
    """AD-PSGD: every `interval` steps each worker begins to average its parameters with a random other worker's, both
    ending with the mean, while both go on computing. No worker waits for its peer to come to some step.

    What is averaged is a copy of the parameters that the steps of the optimizer are added to: gradients are those of
    the parameters as they were when the step began, and the step itself, like an averaging, changes the copy at once.
    A worker takes part in one averaging at a time; one that is asked meanwhile declines, and who asked draws another,
    so nobody ever waits for two, and there is no need for a bipartite graph: there cannot be a deadlock.

    Sent per averaging: the bytes of the parameters by both, and some messages of a few bytes. Staleness: `overlap`
    intervals. Memory: the parameters four times more (the copy, what it was, what is sent, what is received). When a
    peer dies, or is silent for `patience` seconds: an averaging with it changes nothing here (it may have changed the
    peer), and the others train on; collective operations that need it raise `PeerLost`.
    Source: Lian et al. 2018, Algorithm 1.

    Attributes:
        overlap: intervals that an averaging may take before the worker waits for it; 0 waits for it at once.
        patience: seconds after which one that does not answer counts as gone until it is heard of.
    """

    overlap: int = 1
    patience: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(isinstance(self.overlap, int) and self.overlap >= 0, self, "overlap", "must be at least 0")
        require(self.patience > 0, self, "patience", "must be above 0")

    def pairing_of(self, rank: int, size: int) -> Pairing:
        """What decides for worker `rank` of `size`."""
        return Pairing(rank, size, self.seed, self.patience)
