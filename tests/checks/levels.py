"""Instruction set levels of the kernels, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from sordino._core import kernels
from sordino.errors import UsageError

LEVELS = ("baseline", "avx2", "avx512")


def levels() -> Iterator[str]:
    """Yield each level that this machine has, while it is in use. For tests that use `level_as_before`."""
    for level in LEVELS:
        try:
            kernels.set_level(level)
        except UsageError:
            continue
        assert kernels.level() == level
        yield level
