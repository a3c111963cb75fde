"""AD-PSGD: workers average with random others in pairs while both go on computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sordino.algorithms.adpsgd.pairing import Pairing
from sordino.algorithms.asynchronous import Asynchronous
from sordino.algorithms.base import Simulation
from sordino.algorithms.checks import NO_BUFFERS, require
from sordino.algorithms.traffic import Model, Traffic


@dataclass(frozen=True)
class ADPSGD(Asynchronous):
    """AD-PSGD: every `interval` steps each worker begins to average its parameters with a random other worker's.

    Both end with the mean, and both go on computing meanwhile. No worker waits for its peer to come to some step.

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

    steps = "sordino.algorithms.adpsgd.strategy:PairStrategy"
    simulation = Simulation(world="sordino.simulate.averaging:Averaging", refused={"buffers": NO_BUFFERS})

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        return self._exchanges(model, nodes, ways=2, copied=8, hidden=self.overlap > 0)

    def pairing_of(self, rank: int, size: int) -> Pairing:
        """Return what decides for worker `rank` of `size`."""
        return Pairing(rank, size, self.seed, self.patience)
