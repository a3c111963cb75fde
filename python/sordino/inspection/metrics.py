"""Counters of a rank for Prometheus, at an address of SORDINO_METRICS."""

from __future__ import annotations

import errno
import importlib
from collections.abc import Iterator
from typing import Any

from sordino.errors import NotBuilt, UsageError
from sordino.runtime.context import living_contexts

_POLLED_WITHIN_S = 0.2
_MOST_RANKS = 1024  # ranks of a machine
_COUNTERS = {
    "operations": "Operations that this rank has done",
    "operations_in_one_shot": "Operations among them that needed no negotiation",
    "bytes_sent_inside_node": "Payload bytes sent to ranks of this node",
    "bytes_sent_across_nodes": "Payload bytes sent to ranks of other nodes",
    "waited_seconds": "Seconds in which calls have waited for communication",
}


class _Collector:
    """Collector of the counters, for Prometheus. Adds up worlds with the same rank and size, such as groups."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def collect(self) -> Iterator[Any]:
        core = self._library
        labels = ["rank", "size"]
        worlds: dict[tuple[str, str], list[Any]] = {}
        for context in living_contexts():
            worlds.setdefault((str(context.rank), str(context.size)), []).append(context.world)
        for name, text in _COUNTERS.items():
            family = core.CounterMetricFamily(f"sordino_{name}", text, labels=labels)
            for values, alike in worlds.items():
                family.add_metric(values, sum(world.stats[name] for world in alike))
            yield family
        pending = core.GaugeMetricFamily("sordino_pending_operations", "Operations that are not over", labels=labels)
        oldest = core.GaugeMetricFamily(
            "sordino_longest_wait_seconds", "Seconds since the oldest of them was called", labels=labels
        )
        failed = core.GaugeMetricFamily("sordino_failed", "1 if the world has failed, else 0", labels=labels)
        for values, alike in worlds.items():
            waits = [one for world in alike for one in world.waits(_POLLED_WITHIN_S) or []]
            pending.add_metric(values, len(waits))
            oldest.add_metric(values, max((seconds for _, _, seconds, _ in waits), default=0.0))
            failed.add_metric(values, float(any(world.failed for world in alike)))
        yield from (pending, oldest, failed)


_server: tuple[Any, Any] | None = None  # the HTTP server and its thread


def start(address: str, local_rank: int, joined: bool = False) -> None:
    """Serve the counters of this process by HTTP, unless it does already.

    Args:
        address: host and port, such as "127.0.0.1:9400" or "[::1]:9400".
        local_rank: number that is added to the port, so that each rank of a machine has its own.
        joined: whether this process has joined a running job, whose ranks keep their ports when they are renumbered.
            Then it takes the first free port, such as the port of the rank that it replaces.

    Raises:
        UsageError: the address is wrong, or the port is taken.
        NotBuilt: the package prometheus_client is missing.
    """
    global _server
    if _server is not None:
        return
    host, _, number = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # brackets of an IPv6 address
    if not host or not number.isdecimal() or not 0 < int(number) + local_rank < 1 << 16:
        raise UsageError(f"SORDINO_METRICS={address!r}: must be host:port, such as 127.0.0.1:9400")
    try:
        library = importlib.import_module("prometheus_client")
        core = importlib.import_module("prometheus_client.core")
    except ImportError as error:
        raise NotBuilt("SORDINO_METRICS needs the package: pip install 'sordino[metrics]'") from error
    registry = library.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(core))
    port = int(number)
    last = min(port + _MOST_RANKS, (1 << 16) - 1)
    for one in range(port, last + 1) if joined else [port + local_rank]:
        try:
            _server = library.start_http_server(one, host, registry)
            return
        except OSError as error:
            if not joined or one == last or error.errno != errno.EADDRINUSE:
                raise UsageError(f"SORDINO_METRICS={address!r}: port {one} cannot be opened: {error}") from error


def stop() -> None:
    """Stop serving."""
    global _server
    if _server is None:
        return
    server, thread = _server
    _server = None
    server.shutdown()
    server.server_close()
    thread.join()
