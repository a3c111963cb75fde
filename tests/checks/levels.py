"""The kernels' instruction set levels, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from sordino._core import kernels
from sordino.errors import UsageError

LEVELS = ("baseline", "avx2", "avx512")


def levels() -> Iterator[str]:
    """Those that this machine has; each is in use while it is the one. For tests that use `level_as_before`."""
    for level in LEVELS:
        try:
            kernels.set_level(level)
        except UsageError:
            continue
        assert kernels.level() == level
        yield level
