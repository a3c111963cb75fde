"""What an exchange of push-sum does: numerators lie where the model's values do between exchanges."""

from __future__ import annotations

from typing import Any

import torch

from sordino._core import Handle
from sordino.algorithms.gossip.mixing import Averaging, Peers
from sordino.algorithms.push_sum import PushSum
from sordino.runtime.flat_buffer import FlatBuffer, ParameterBuffer


class PushSumMixing(Averaging):
    """Push-sum. Between exchanges the arena holds z = x / weight, in one x and the weights.

    The optimizer changes z by some d, and x by the same: x = weight * z_before + d = z + (weight - 1) * z_before. Only
    where weights are not 1 must z_before be known, so without overlap an exchange costs no more than an averaging.
    """

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: PushSum) -> None:
        super().__init__(peers, arena, algorithm)
        self._overlap = algorithm.overlap
        self._before: FlatBuffer | None = None  # z after the last exchange, if a weight was not 1
        self._under_way: list[tuple[Handle, FlatBuffer]] = []  # oldest first
        self._spare: list[FlatBuffer] = []

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        self._to_numerators()
        try:
            if self._overlap == 0:
                super().exchange(round)
            else:
                if len(self._under_way) == self._overlap:
                    self._absorb()
                self._send(round)
        finally:
            self._to_values()

    @torch.no_grad()
    def flush(self) -> None:
        if not self._under_way:
            return
        self._to_numerators()
        try:
            while self._under_way:
                self._absorb()
        finally:
            self._to_values()

    def load_state(self, state: dict[str, Any]) -> None:
        # What is under way belongs to the parameters of before.
        while self._under_way:
            handle, parcel = self._under_way.pop(0)
            handle.wait()
            self._spare.append(parcel)
        for weight in self.arena.weights:
            weight.fill_(1)
        self._before = None

    def _new_values(self) -> FlatBuffer:
        return FlatBuffer(self.peers.context, self.arena.layout, self.arena.device)

    def _send(self, round: int) -> None:
        parcel = self._spare.pop() if self._spare else self._new_values()
        parcel.copy_(self.arena)
        self._under_way.append((self.start(round, 0, parcel, others_only=True), parcel))
        for segment, run in self.arena.runs:
            run.mul_(self.topologies[0].row(round, segment, self.peers.index)[2])

    def _absorb(self) -> None:
        handle, parcel = self._under_way[0]
        handle.wait()
        del self._under_way[0]
        self.arena.add_(parcel)
        self._spare.append(parcel)

    def _to_numerators(self) -> None:
        if self._before is None:
            return
        weights = self._weights()
        for (segment, run), (_, before) in zip(self.arena.runs, self._before.runs):
            run.add_(before, alpha=weights[segment] - 1)
        self._restore(weights)

    def _to_values(self) -> None:
        weights = self._weights()
        if all(weight == 1 for weight in weights):
            self._before = None
            return
        for segment, run in self.arena.runs:
            run.div_(weights[segment])
        self._restore(weights)
        if self._before is None:
            self._before = self._new_values()
        self._before.copy_(self.arena)

    def _weights(self) -> list[float]:
        """Read them all at once: of a GPU's memory that is one wait."""
        found: list[float] = torch.cat(self.arena.weights).tolist()
        return found

    def _restore(self, weights: list[float]) -> None:
        """Set the weights again, which lie among the values that have just been computed with."""
        for weight, value in zip(self.arena.weights, weights):
            weight.fill_(value)
