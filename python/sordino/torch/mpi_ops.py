"""Horovod's module of this name.

It has the same functions for scripts that import `horovod.torch.mpi_ops`, but not the autograd classes behind them.
"""

from sordino.torch import *  # noqa: F403
from sordino.torch import __all__ as __all__
from sordino.torch import mpi_lib_v2 as mpi_lib  # noqa: F401


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, which Sordino's Adasum does not need."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
