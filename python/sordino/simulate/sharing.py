"""Transfers at the same time share the links that they have in common, fairly.

A worker sends and receives at its link's rate, both at once. The transfers that leave a worker share what it sends,
those that enter it what it receives, and what one of them cannot use, because its other end is slower, the others do:
max-min fairness, which TCP streams of equal delay come near to. Whenever transfers have begun or ended, the rates of
all are found anew; between, they do not change, so the ends are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sordino.simulate.links import Links, exact

_BYTES = 8e-9  # 10^9 bits in a byte

Call = tuple[Callable[..., None], tuple[Any, ...]]


def fair_rates(ends: Sequence[tuple[int, int]], gbps: Sequence[float]) -> list[float]:
    """Return the max-min fair rates of transfers, in 10^9 bits a second.

    The link that has least for each of its transfers gives all of them that much; so do the others, in turn, with what
    is left of them.

    Args:
        ends: sender and receiver of each.
        gbps: what each worker sends, and what it receives.
    """
    over: dict[tuple[str, int], set[int]] = {}
    for number, (sender, to) in enumerate(ends):
        over.setdefault(("from", sender), set()).add(number)
        over.setdefault(("to", to), set()).add(number)
    left = {link: float(gbps[link[1]]) for link in over}
    rates = [0.0] * len(ends)
    while over:
        least = min(over, key=lambda link: left[link] / len(over[link]))
        share = left[least] / len(over[least])
        for number in list(over[least]):
            rates[number] = share
            for link in (("from", ends[number][0]), ("to", ends[number][1])):
                over[link].discard(number)
                if share < left[link]:
                    left[link] -= share
                if not over[link]:
                    del over[link]
    return rates


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer under way.

    Attributes:
        ends: sender and receiver.
        bytes: that had not left when it got the rate that it has.
        call: what is called when all have arrived.
        rate: in 10^9 bits a second.
        since: when it got that rate.
        end: when the last byte leaves, if the rate stays.
    """

    ends: tuple[int, int]
    bytes: float
    call: Call
    rate: float
    since: float
    end: float


class Sharing:
    """All transfers under way. It knows no clock: whoever drives it says what time it is, in order.

    When all that begins and ends at a time has been told, `divide` finds the rates from then on.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._gbps: list[float] = links.gbps.tolist()
        self.flows: list[Flow] = []

    def begin(self, now: float, sender: int, to: int, count: float, call: Call) -> None:
        """Note that a transfer of `count` bytes begins."""
        self.flows.append(Flow((sender, to), count, call, 0.0, now, math.inf))

    def drop(self, worker: int) -> None:
        """Note that a worker sends and receives no more; its transfers never arrive."""
        self.flows = [flow for flow in self.flows if worker not in flow.ends]

    def ended(self, now: float) -> list[Call]:
        """Return the calls of those whose last byte has left by now, in the order in which they began; forget them."""
        over = [flow.call for flow in self.flows if flow.end <= now]
        self.flows = [flow for flow in self.flows if flow.end > now]
        return over

    def divide(self, now: float) -> float | None:
        """Find all rates; return when the next transfer's last byte leaves, unless they change before; None: never."""
        latency = self._links.latency
        for flow, rate in zip(self.flows, fair_rates([flow.ends for flow in self.flows], self._gbps), strict=True):
            if rate != flow.rate:
                if now > flow.since:
                    flow.bytes = max(flow.bytes - flow.rate * (now - flow.since) / _BYTES, 0.0)
                flow.rate, flow.since = rate, now
                # Alone it takes exactly what `Links.seconds` says.
                flow.end = now + exact(latency + _BYTES * flow.bytes / rate) - latency
        return min((flow.end for flow in self.flows), default=None)
