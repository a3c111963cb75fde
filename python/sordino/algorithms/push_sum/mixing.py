"""Exchange of push-sum. During an exchange, the memory of the model's values holds their numerators."""

from __future__ import annotations

from typing import Any

import torch

from sordino._core import Handle
from sordino.algorithms.gossip.mixing import Averaging, Peers
from sordino.algorithms.push_sum import PushSum
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer

_BLOCK_BYTES = 128 * 1024


class PushSumMixing(Averaging):
    """Mixing of push-sum. The arena holds z = x / weight between exchanges; during one it holds x and the weights.

    The optimizer changes z by some d, and x changes by the same d: x = weight * z_before + d, which is
    z + (weight - 1) * z_before. So z_before is kept only where weights are not 1. Without overlap they are 1, and an
    exchange costs no more than an averaging. With overlap all changes of an exchange are made block by block, so that
    the memory of each block is read and written once.
    """

    def __init__(self, peers: Peers, arena: ParameterBuffer, algorithm: PushSum) -> None:
        super().__init__(peers, arena, algorithm)
        self._overlap = algorithm.overlap
        self._before: FlatBuffer | None = None  # z after the last exchange, if a weight was not 1
        self._under_way: list[tuple[Handle, FlatBuffer]] = []  # exchanges in flight, oldest first
        self._spare: list[FlatBuffer] = []

    @torch.no_grad()
    def exchange(self, round: int) -> None:
        if self._overlap > 0:
            received = None
            if len(self._under_way) == self._overlap:
                self._under_way[0][0].wait()
                _, received = self._under_way.pop(0)
            self._send(round, received)
            if received is not None:
                self._spare.append(received)
            return
        self._to_numerators()
        try:
            super().exchange(round)
        finally:
            self._to_values()

    def _send(self, round: int, received: FlatBuffer | None) -> None:
        """Add the parcel that was received, send a copy of the sum, and keep this rank's own share of it."""
        parcel = self._spare.pop() if self._spare else self._new_values()
        weights = self._weights()
        sums = weights
        if received is not None:
            sums = [weight + more for weight, more in zip(weights, self._weights(received))]
        shares = [self.topologies[0].row(round, segment, self.peers.index)[2] for segment in range(len(weights))]
        kept = [weight * share for weight, share in zip(sums, shares)]
        before, self._before = self._before, self._before or self._new_values()
        for number, (segment, run) in enumerate(self.arena.runs):
            for part in _blocks(run):
                values = run[part]
                if before is not None:
                    values.add_(before.runs[number][1][part], alpha=weights[segment] - 1)
                if received is not None:
                    values.add_(received.runs[number][1][part])
                parcel.runs[number][1][part].copy_(values)
                values.mul_(shares[segment]).div_(kept[segment])
                self._before.runs[number][1][part].copy_(values)
        self._restore(sums, parcel)
        self._restore(sums)
        handle = self.start(round, 0, parcel, others_only=True)
        self._under_way.append((handle, parcel))
        self._restore(kept)

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
        # Exchanges in flight belong to the parameters before the load.
        while self._under_way:
            handle, parcel = self._under_way.pop(0)
            handle.wait()
            self._spare.append(parcel)
        for weight in self.arena.weights:
            weight.fill_(1)
        self._before = None

    def _new_values(self) -> FlatBuffer:
        return FlatBuffer(self.peers.context, self.arena.layout, self.arena.device)

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

    def _weights_in(self, buffer: FlatBuffer) -> list[torch.Tensor]:
        """Return the weights that lie among a buffer's values."""
        weights = self.arena.weights
        if buffer is self.arena:
            return weights
        return [buffer.flat(one.dtype, one.data_ptr() - self.arena.address, 1) for one in weights]

    def _weights(self, buffer: FlatBuffer | None = None) -> list[float]:
        """Return the weights of all segments. Reading them together takes one wait for a GPU instead of many."""
        found: list[float] = torch.cat(self._weights_in(buffer or self.arena)).tolist()
        return found

    def _restore(self, weights: list[float], buffer: FlatBuffer | None = None) -> None:
        """Set the weights again. They lie among the values that an operation on a whole run has just changed."""
        for weight, value in zip(self._weights_in(buffer or self.arena), weights):
            weight.fill_(value)


def _blocks(run: torch.Tensor) -> list[slice]:
    """Return the parts of a run that are changed one after the other: on the CPU, parts that fit its caches."""
    step = _BLOCK_BYTES // run.element_size() if run.device.type == "cpu" else max(len(run), 1)
    return [slice(begin, begin + step) for begin in range(0, len(run), step)]
