"""Fair sharing of links by simultaneous transfers.

A worker sends and receives at its link's rate, both at once. The transfers that leave a worker share its sending rate,
and the transfers that enter it its receiving rate. A rate that one transfer cannot use, because its other end is
slower, goes to the others. This is max-min fairness, which TCP streams of equal delay approximate. The rates of all
transfers are computed again whenever a transfer begins or ends. They are constant in between, so end times are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sordino.simulate.links import Links, exact

_BYTES = 8e-9  # bits in a byte, in units of 10^9

Call = tuple[Callable[..., None], tuple[Any, ...]]


def fair_rates(ends: Sequence[tuple[int, int]], gbps: Sequence[float]) -> list[float]:
    """Return the max-min fair rates of transfers, in 10^9 bits per second.

    The link with the smallest share per transfer gives all its transfers that share. Then the other links do the same,
    in turn, with their remaining rates.

    Args:
        ends: sender and receiver of each transfer.
        gbps: rate at which each worker sends, and at which it receives.
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
    """Transfer in flight.

    Attributes:
        ends: sender and receiver.
        bytes: bytes that had not left when the transfer got its current rate.
        call: call to make when all bytes have arrived.
        rate: rate in 10^9 bits per second.
        since: time at which it got that rate.
        end: time at which the last byte leaves if the rate does not change.
    """

    ends: tuple[int, int]
    bytes: float
    call: Call
    rate: float
    since: float
    end: float


class Sharing:
    """All transfers in flight. It has no clock: the caller passes the time, which must not decrease.

    Call `divide` after all transfers that begin or end at one time. It computes the rates from then on.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._gbps: list[float] = links.gbps.tolist()
        self.flows: list[Flow] = []

    def begin(self, now: float, sender: int, to: int, count: float, call: Call) -> None:
        """Note the beginning of a transfer of `count` bytes."""
        self.flows.append(Flow((sender, to), count, call, 0.0, now, math.inf))

    def drop(self, worker: int) -> None:
        """Drop the transfers of a worker that has died. They never arrive."""
        self.flows = [flow for flow in self.flows if worker not in flow.ends]

    def ended(self, now: float) -> list[Call]:
        """Remove the transfers whose last byte has left by now. Return their calls in the order of beginning."""
        over = [flow.call for flow in self.flows if flow.end <= now]
        self.flows = [flow for flow in self.flows if flow.end > now]
        return over

    def divide(self, now: float) -> float | None:
        """Compute all rates. Return the time at which the next transfer's last byte leaves; None: no transfers."""
        latency = self._links.latency
        for flow, rate in zip(self.flows, fair_rates([flow.ends for flow in self.flows], self._gbps), strict=True):
            if rate != flow.rate:
                if now > flow.since:
                    flow.bytes = max(flow.bytes - flow.rate * (now - flow.since) / _BYTES, 0.0)
                flow.rate, flow.since = rate, now
                # Without other transfers this takes exactly `Links.seconds`.
                flow.end = now + exact(latency + _BYTES * flow.bytes / rate) - latency
        return min((flow.end for flow in self.flows), default=None)
