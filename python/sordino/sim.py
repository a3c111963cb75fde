"""Ranks as threads of one process, for tests and for experiments without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from sordino._core import Device, SimNetwork, sim_worlds
from sordino.algorithms import Algorithm
from sordino.log.core import listen
from sordino.runtime.context import Context, use
from sordino.runtime.exchange.helpers import Helpers
from sordino.torch.start import helped, survives_losses

Result = TypeVar("Result")


def run(
    size: int,
    function: Callable[..., Result],
    *args: Any,
    ranks_per_node: int = 0,
    algorithm: Algorithm | str | None = None,
    devices: Sequence[Device] = (),
    on_peer_lost: Literal["raise", "continue"] = "raise",
    network: SimNetwork | None = None,
) -> list[Result]:
    """Call `function(*args)` on `size` ranks at once and return the results in rank order.

    Within the call, `sordino.torch` acts as that rank. If a rank raises, the others get `PeerLost` as under MPI, and
    the first error is raised here.

    Args:
        size: number of ranks (threads).
        function: called once per rank.
        *args: arguments of the call, the same objects on every rank.
        ranks_per_node: number of ranks on each node; 0 puts all on one node.
        algorithm: see `sordino.torch.init`. Helpers do not call `function` and have no result.
        devices: simulated GPUs (`sordino._core.sim_device`). Rank r treats CPU tensors as memory of device r, modulo
            their number.
        on_peer_lost: see `sordino.torch.init`. With "continue" a lost rank has no result, and an error is raised only
            if no rank finishes.
        network: network of `size` ranks with their nodes, through which a test can cause faults; None: a new one.
    """
    dedicated = helped(algorithm)
    survivable = survives_losses(on_peer_lost, algorithm)
    place = network if network is not None else _nodes(size, ranks_per_node)
    all_contexts = _contexts(place, devices if dedicated is None else (), survivable)  # helpers have no GPUs
    nodes = all_contexts[0].world.nodes
    chosen, workers = list(range(size)), all_contexts
    if dedicated is not None:
        chosen = dedicated.roles(nodes).workers
        workers = _contexts([nodes[rank] for rank in chosen], devices, survivable)
    results: list[Any] = [None] * len(workers)
    failures: list[BaseException] = []
    finished: list[int] = []

    def body(context: Context, work: Callable[[], None]) -> None:
        with use(context):
            try:
                work()
            except BaseException as error:
                failures.append(error)
                context.abort(error)
            try:
                context.shutdown()
            except BaseException as error:
                failures.append(error)

    def train(context: Context, rank: int) -> None:
        if dedicated is not None:
            context.helpers = Helpers(all_contexts[rank], dedicated)
        place = context.rank
        results[place] = function(*args)
        finished.append(place)

    def serve(context: Context) -> None:
        assert dedicated is not None
        Helpers(context, dedicated).serve()

    threads = [
        threading.Thread(target=body, args=(context, partial(train, context, rank)), name=f"rank-{context.rank}")
        for context, rank in zip(workers, chosen)
    ]
    threads += [
        threading.Thread(target=body, args=(context, partial(serve, context)), name=f"helper-{rank}")
        for rank, context in enumerate(all_contexts)
        if rank not in chosen
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures and not (survivable and finished):
        raise failures[0]
    return results


def contexts(
    size: int, ranks_per_node: int = 0, devices: Sequence[Device] = (), survive_losses: bool = False
) -> list[Context]:
    """Return the contexts that `run` would use, for tests that manage the threads themselves."""
    return _contexts(_nodes(size, ranks_per_node), devices, survive_losses)


def _nodes(size: int, ranks_per_node: int) -> list[int]:
    return [rank // ranks_per_node if ranks_per_node else 0 for rank in range(size)]


def _contexts(network: SimNetwork | list[int], devices: Sequence[Device], survive_losses: bool) -> list[Context]:
    listen()
    made = [Context(world) for world in sim_worlds(network, survive_losses)]
    for context in made if devices else ():
        context.host_device = devices[context.rank % len(devices)]
    return made
