"""Mixing of parameters that are sent encoded.

    own values -> encoded, with Q(y) what others decode -> a message to each peer, with all segments that it needs
    messages of peers -> Q(x) for each source x -> y += weight * sum of (Q(x) - Q(y))

If the mixing matrix is doubly stochastic, the mean over all workers stays the same, whatever an encoding loses: the
weights with which other workers add a Q sum to the weight with which its own worker subtracts it. This requires that no
block is missed (see below), and parameters of at least 32 bits, because 16-bit parameters are rounded when they change.

A codec such as `Int8` has for each block of values an estimate of the distance between workers. A block that was
farther away is *missed*: the worker keeps its own values there, and encodes it for a greater distance next time. At
first the estimate is twice the distance that a worker's own values have moved, because workers usually start equal.
Estimates are part of checkpoints, so resumed training is the same, bit for bit. Without them training is correct, too,
but the first exchanges may miss blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sordino._core import Handle, Topology
from sordino.codecs import FlatCodec
from sordino.codecs.coders import NearCoder
from sordino.runtime.devices import HOST
from sordino.runtime.exchange.channel import wait_for_all
from sordino.runtime.exchange.flat_buffer import FlatBuffer, ParameterBuffer

if TYPE_CHECKING:
    from sordino.algorithms.gossip.mixing import Peers


@dataclass
class MixingStatistics:
    """Counts of the exchanges of this rank since the last meeting.

    Attributes:
        exchanges: mixings with encoded parameters.
        blocks: blocks of values that this rank has received from its peers.
        missed: blocks among them that were too far away to be decoded, so this rank kept its own values.
        bytes: bytes of the encoded parameters that this rank has sent.
    """

    exchanges: int = 0
    blocks: int = 0
    missed: int = 0
    bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return dict(vars(self))


class _Run:
    """A run of adjacent values, in one segment and of one dtype.

    Attributes:
        segment: its segment.
        count: number of values.
        place: range of the encoded run in the bytes of all encoded runs.
        distances: estimates of the distances between workers.
    """

    def __init__(self, segment: int, count: int, begin: int, coder: NearCoder) -> None:
        self.segment, self.count = segment, count
        self.place = slice(begin, begin + coder.bytes(count))
        self.distances = torch.empty(0, dtype=torch.float32, device=HOST)


class CompressedMixing:
    """Mixing of one rank with a codec.

    Args:
        peers: the ranks that exchange.
        arena: the parameters, which determine the first estimates.
        codec: the codec, which has a `near_coder`.
    """

    def __init__(self, peers: Peers, arena: ParameterBuffer, codec: FlatCodec) -> None:
        coder = codec.near_coder()
        assert coder is not None
        self._peers, self._arena, self._codec, self._coder = peers, arena, codec, coder
        self._runs: list[_Run] = []
        end = 0
        for segment, values in arena.runs:
            self._runs.append(_Run(segment, values.numel(), end, coder))
            end = self._runs[-1].place.stop
        self._segments: list[slice] = []  # the bytes of each encoded segment; runs are in the order of segments
        for segment in range(arena.segment_count):
            places = [run.place for run in self._runs if run.segment == segment]
            self._segments.append(slice(places[0].start, places[-1].stop) if places else slice(0, 0))
        self._encoded = torch.empty(end, dtype=torch.uint8, device=HOST)
        most = max((run.count for run in self._runs), default=0)
        self._change = torch.empty(most, dtype=torch.float32, device=HOST)
        self._estimated = False
        self._start: list[torch.Tensor] | None = None  # parameters before the first step, until the first exchange

    def restart(self) -> None:
        """Forget the estimates, because the parameters are replaced."""
        self._estimated, self._start = False, None

    def state(self) -> dict[str, Any]:
        """Return the estimates, for checkpoints; nothing before the first exchange."""
        return {"distances": [run.distances.clone() for run in self._runs]} if self._estimated else {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from `state()`. If it does not fit these parameters, continue without estimates."""
        self.restart()
        saved = state.get("distances", [])
        wanted = [self._coder.distances(torch.zeros(run.count, dtype=torch.float32, device=HOST)) for run in self._runs]
        fits = len(saved) == len(wanted) and all(
            isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (like.shape, like.dtype)
            for one, like in zip(saved, wanted)
        )
        if fits and len(wanted) > 0:
            for run, one in zip(self._runs, saved):
                run.distances = one.to(HOST, copy=True)
            self._estimated = True

    @torch.no_grad()
    def begin(self) -> None:
        """Prepare a step of the optimizer. The first one keeps a copy of the parameters until the first exchange."""
        if not self._estimated and self._start is None:
            self._arena.adopt()
            self._start = [values.clone() for _, values in self._arena.runs]

    @torch.no_grad()
    def mix(self, round: int, topology: Topology, values: FlatBuffer) -> None:
        """Mix `values` in place. Collective.

        Args:
            round: round of the topology.
            topology: topology with averages only (`only_averages`).
            values: the parameters, or a buffer with the same layout.

        Raises:
            PeerLost, Timeout, TransportError: the exchange has failed. Values and estimates are unchanged.
        """
        self._estimate()
        segments = range(len(self._segments))
        rows = [topology.row(round, segment, self._peers.index) for segment in segments]
        sources = self._segments_by_rank([sources for sources, _, _ in rows])
        targets = self._segments_by_rank([topology.destinations(round, one, self._peers.index) for one in segments])
        used = {segment for parts in (sources, targets) for found in parts.values() for segment in found}
        own = [one.to(HOST, torch.float32) for _, one in values.runs]
        infinite = sum(
            self._coder.encode(one, run.distances, self._encoded[run.place])
            for one, run in zip(own, self._runs)
            if run.segment in used
        )
        received = self._transfer(round, sources, targets)
        counts = self._peers.statistics
        for one, run, (_, target) in zip(own, self._runs, values.runs):
            encoded = [
                message[offset : offset + run.place.stop - run.place.start]
                for rank, message in received.items()
                for offset in self._offsets(run, sources[rank])
            ]
            if not encoded:
                continue
            change, weight = self._change[: run.count], rows[run.segment][2]
            mine = self._encoded[run.place]
            counts.missed += self._coder.change(one, mine, encoded, weight, change, run.distances)
            counts.blocks += len(encoded) * len(run.distances)
            target.add_(change.to(target))
        counts.exchanges += 1
        if infinite > 0:
            parts = self._codec.not_finite(infinite, "a NaN, an infinity or a value too large for the codec")
            warnings.warn(
                f"{self._peers.name}: {parts}, so the same parameters of its peers are not finite after the exchange",
                RuntimeWarning,
                stacklevel=3,
            )

    def _estimate(self) -> None:
        """Make the first estimates, from the distance that the parameters have moved."""
        if self._estimated:
            return
        for number, (run, (_, values)) in enumerate(zip(self._runs, self._arena.runs)):
            moved = values - self._start[number] if self._start is not None else torch.zeros_like(values)
            run.distances = self._coder.distances(moved.to(HOST, torch.float32))
        self._estimated, self._start = True, None

    def _segments_by_rank(self, places: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Return the segments of each rank. `places` has, for each segment, the places of its ranks."""
        ranks = self._peers.process_set.ranks or []
        found: dict[int, list[int]] = {}
        for segment, members in enumerate(places):
            for place in members:
                found.setdefault(ranks[place], []).append(segment)
        return dict(sorted(found.items()))

    def _offsets(self, run: _Run, segments: Sequence[int]) -> list[int]:
        """Return the offset, in bytes, of a run in a message with these segments; [] if they do not contain it."""
        if run.segment not in segments:
            return []
        before = sum(self._bytes(segment) for segment in segments if segment < run.segment)
        return [before + run.place.start - self._segments[run.segment].start]

    def _bytes(self, segment: int) -> int:
        place = self._segments[segment]
        return int(place.stop - place.start)

    def _transfer(
        self, round: int, sources: dict[int, list[int]], targets: dict[int, list[int]]
    ) -> dict[int, torch.Tensor]:
        """Send encoded segments to each target, and return the message of each source."""
        received = {
            rank: torch.empty(sum(map(self._bytes, segments)), dtype=torch.uint8, device=HOST)
            for rank, segments in sources.items()
        }
        started = [self._start_message(False, message, rank, round) for rank, message in received.items()]
        for rank, segments in targets.items():
            message = torch.cat([self._encoded[self._segments[one]] for one in segments])
            self._peers.statistics.bytes += message.numel()
            started.append(self._start_message(True, message, rank, round))
        wait_for_all(started)
        return received

    def _start_message(self, sends: bool, message: torch.Tensor, rank: int, round: int) -> Handle:
        return self._peers.channel.start_message(sends, message, rank, round)
