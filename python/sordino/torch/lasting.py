"""Which of what users ask for can go on when a rank is lost."""

from __future__ import annotations

import os
from typing import Any

from sordino.algorithms import Algorithm, AllReduce, Layered, LocalSGD, ParameterSkipping
from sordino.errors import UsageError
from sordino.torch.helpers import helped

_INSTEAD = 'use on_peer_lost="raise", and start the job with `sordino run --restarts N` to go on from checkpoints'


def goes_on(on_peer_lost: str | None, algorithm: Algorithm | str | None) -> bool | None:
    """Whether ranks go on without those that are lost; None: as the environment says.

    Raises:
        UsageError: `on_peer_lost` is neither "raise" nor "continue", or ranks without a model are to help the others.
    """
    if on_peer_lost not in (None, "raise", "continue"):
        raise UsageError(f"on_peer_lost={on_peer_lost!r} is neither 'raise' nor 'continue'")
    wanted = on_peer_lost or os.environ.get("SORDINO_ON_PEER_LOST")
    if wanted == "continue" and helped(algorithm) is not None:
        raise UsageError(f"on_peer_lost='continue' does not go with ranks that have no model; {_INSTEAD}")
    return None if on_peer_lost is None else on_peer_lost == "continue"


def check_outlasting(options: dict[str, Any], adasum: bool) -> None:
    """UsageError for options of `DistributedOptimizer` with which a rank that is lost takes something with it."""
    algorithm = options["algorithm"]
    problem = None
    if adasum:
        problem = "op=Adasum"
    elif isinstance(algorithm, AllReduce) and algorithm.double_buffering:
        problem = "AllReduce(double_buffering=True)"
    elif isinstance(algorithm, Layered):
        problem = "Layered"
    elif isinstance(algorithm, LocalSGD) and algorithm.sharded:
        problem = 'LocalSGD(exchange="sharded")'
    elif isinstance(algorithm, ParameterSkipping) and algorithm.exchange == "parameter-server":
        problem = 'ParameterSkipping(exchange="parameter-server")'
    if problem is not None:
        raise UsageError(f"{problem} does not go on without ranks that are lost: {_INSTEAD}")
