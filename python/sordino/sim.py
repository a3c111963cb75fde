"""Ranks as threads of one process: for tests, and for trying things without MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sordino._core import sim_worlds
from sordino.context import Context, use

Result = TypeVar("Result")


def run(size: int, function: Callable[..., Result], *args: Any, ranks_per_node: int = 0) -> list[Result]:
    """Calls `function(*args)` on `size` ranks at once and returns what each returned, in rank order.

    Inside, `sordino.torch` acts as that rank. If ranks raise, the others get `PeerLost` as they would under MPI, and
    the error that came first is raised here.

    Args:
        size: number of ranks (threads).
        function: called once a rank.
        ranks_per_node: cut the ranks into nodes of this size; 0 puts all on one node.
    """
    contexts = [Context(world) for world in sim_worlds(size, ranks_per_node)]
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def body(context: Context) -> None:
        with use(context):
            try:
                results[context.rank] = function(*args)
            except BaseException as error:
                failures.append((context.rank, error))
                context.world.abort(f"{type(error).__name__}: {error}")
            finally:
                context.world.shutdown()

    threads = [threading.Thread(target=body, args=(context,), name=f"rank-{context.rank}") for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0][1]
    return results


def contexts(size: int, ranks_per_node: int = 0) -> Sequence[Context]:
    """The contexts that `run` would use, for tests that drive the threads themselves."""
    return [Context(world) for world in sim_worlds(size, ranks_per_node)]
