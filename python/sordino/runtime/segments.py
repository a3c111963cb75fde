"""Which tensors of a model are one segment: what gossip sends to one peer, or what is reduced as one bucket."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from sordino.errors import UsageError

Segments = str | int | tuple[str, ...]


def segment_numbers(names: Sequence[str], sizes: Sequence[float], segments: Segments | Sequence[str]) -> list[int]:
    """Return the segment of each tensor, numbered from 0 in the order of first use.

    Args:
        names: of the tensors.
        sizes: their bytes.
        segments: as of `sordino.algorithms.Crossover`.

    Raises:
        UsageError: a pattern matches no name.
    """
    if segments == "model":
        return [0] * len(names)
    if isinstance(segments, int):
        return _up_to(sizes, segments)
    keys: list[object]
    if isinstance(segments, str):
        keys = [block_of(name) for name in names]
    else:
        for pattern in segments:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"segments: the pattern {pattern!r} matches no parameter; they are {', '.join(names[:8])}…"
                )
        keys = [next((i for i, pattern in enumerate(segments) if fnmatchcase(name, pattern)), None) for name in names]
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _up_to(sizes: Sequence[float], limit: int) -> list[int]:
    numbers, used, number = [], 0.0, 0
    for size in sizes:
        if used > 0 and used + size > limit:
            used, number = 0.0, number + 1
        used += size
        numbers.append(number)
    return numbers


def block_of(name: str) -> str:
    """Return the block of a parameter: the top-level module, or the member of a numbered container in it."""
    parts = name.split(".")
    if len(parts) == 1:
        return ""  # of the model itself
    return ".".join(parts[:2]) if len(parts) > 2 and parts[1].isdigit() else parts[0]
