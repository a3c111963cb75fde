"""Results of a worker, and comparisons between its ranks."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

import sordino.torch as hvd


def report(results: dict[str, Any], main: bool) -> None:
    """Print the results on the main rank, and that all is well. Each line is one write, since ranks share a pipe."""
    if main:
        os.write(1, f"results {json.dumps(results, default=str)}\n".encode())
    os.write(1, b"well\n")


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().float().flatten() for one in module.parameters()])


def equal_on_all_ranks(module: torch.nn.Module) -> bool:
    """Return whether all ranks have the same parameters. Collective."""
    hvd.init()  # a plain job has not done that
    all_ranks = hvd.allgather(flat(module)[None])
    return bool((all_ranks == all_ranks[0]).all())


def mean_on_all_ranks(module: torch.nn.Module) -> torch.Tensor:
    """Return the mean of the parameters over ranks. Collective."""
    hvd.init()
    return hvd.allreduce(flat(module))
