"""Strategy for NoLoCo: gossip whose exchange is an outer step, and which can show the outer parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sordino.algorithms.gossip.strategy import GossipStrategy
from sordino.algorithms.noloco import NoLoCo
from sordino.algorithms.noloco.outer import OuterGossip


class NoLoCoStrategy(GossipStrategy):
    """Strategy for `NoLoCo`."""

    algorithm: NoLoCo
    asked: NoLoCo

    def outer_parameters(self) -> AbstractContextManager[None]:
        if not isinstance(self._mixing, OuterGossip):  # no step yet, or no other rank
            return nullcontext()
        return self._mixing.outer_parameters()

    def carried_state(self) -> dict[str, Any]:
        # The outer parameters stay valid where parameters are unfrozen. After a loss, `all_are_alike` replaces them.
        return self.state_dict()
