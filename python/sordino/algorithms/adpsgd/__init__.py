"""AD-PSGD: random pairs of workers average their parameters while both keep computing."""

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
    """AD-PSGD: every `interval` steps each worker starts to average its parameters with those of a random peer.

    Both end with the mean, and both keep computing meanwhile. No worker waits for its peer to reach a certain step.

    Averaging works on a copy of the parameters. Gradients belong to the parameters at the beginning of the step. The
    step and each averaging change the copy at once and in full. A worker takes part in one averaging at a time. A
    worker that is asked meanwhile declines, and the asking worker draws another peer. So no worker waits for two, and
    deadlock is impossible without a bipartite graph.

    Sent per averaging: the bytes of the parameters by both, and some messages of a few bytes. Staleness: `overlap`
    intervals. Memory: the parameters four times more (the copy, its previous values, sent values, received values).
    When a peer dies, or is silent for `patience` seconds: an averaging with it changes nothing here (it may have
    changed the peer), and the remaining workers train on; collective operations that need the peer raise `PeerLost`.
    Source: Lian et al. 2018, Algorithm 1.

    Attributes:
        overlap: intervals that an averaging may take before the worker waits for it; 0 waits for it at once.
        patience: seconds without an answer after which a peer counts as gone, until it sends a message again.
    """

    overlap: int = 1
    patience: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.overlap >= 0, self, "overlap", "must be at least 0")
        require(self.patience > 0, self, "patience", "must be above 0")

    steps = "sordino.algorithms.adpsgd.strategy:PairStrategy"
    simulation = Simulation(world="averaging", refused={"buffers": NO_BUFFERS})

    def traffic(self, model: Model, nodes: Sequence[int]) -> Traffic:
        return self._exchanges(model, nodes, ways=2, copied=8, hidden=self.overlap > 0)

    def pairing_of(self, rank: int, size: int) -> Pairing:
        """Return the state machine of worker `rank` of `size`."""
        return Pairing(rank, size, self.seed, self.patience)
