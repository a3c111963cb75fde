"""Strategy for NoLoCo: gossip whose exchange is an outer step."""

from __future__ import annotations

from typing import Any

from sordino.algorithms.gossip.strategy import OuterStrategy
from sordino.algorithms.noloco import NoLoCo


class NoLoCoStrategy(OuterStrategy):
    """Strategy for `NoLoCo`."""

    algorithm: NoLoCo
    asked: NoLoCo

    def carried_state(self) -> dict[str, Any]:
        # The outer parameters stay valid where parameters are unfrozen. After a loss, `all_are_alike` replaces them.
        return self.state_dict()
