"""Division of a model into segments: sets of tensors that gossip sends to one peer, or that one bucket reduces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase

from sordino.errors import UsageError
from sordino.runtime.parameter_names import without_wrappers

Segments = str | int | tuple[str, ...]
Path = tuple[str, ...]
_FEW = 4  # large blocks are divided if there are at most this many
_LARGE = 1 << 20  # in bytes; the limit of a piece is never smaller
_PIECES = 16  # approximate number of pieces if all of the model is divided


def segment_numbers(
    names: Sequence[str], sizes: Sequence[float], segments: Segments | Sequence[str], others: Sequence[str] = ()
) -> list[int]:
    """Return the segment of each tensor, numbered from 0 in the order of first use.

    Args:
        names: names of the tensors.
        sizes: their sizes in bytes.
        segments: see `sordino.algorithms.Crossover`.
        others: names of tensors that are in no segment, such as frozen parameters. A pattern may match only these.

    Raises:
        UsageError: a pattern matches no name.
    """
    if segments == "model":
        return [0] * len(names)
    if isinstance(segments, int):
        return _up_to(sizes, segments)
    if isinstance(segments, str):
        return _blocks(names, sizes)
    for pattern in segments:
        if not any(fnmatchcase(name, pattern) for name in (*names, *others)):
            raise UsageError(
                f"segments: the pattern {pattern!r} matches no parameter; the parameters are {', '.join(names[:8])}…"
            )
    return _numbered([next((i for i, one in enumerate(segments) if fnmatchcase(name, one)), None) for name in names])


def _numbered(keys: Sequence[object]) -> list[int]:
    """Return a number for each key, from 0 in the order of first use."""
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [order[key] for key in keys]


def _blocks(names: Sequence[str], sizes: Sequence[float]) -> list[int]:
    """Return the block of each tensor. If there are at most 4 blocks, divide large blocks into pieces."""
    numbers = _numbered(blocks_of(names))
    if max(numbers, default=0) >= _FEW:
        return numbers
    limit = max(_LARGE, sum(sizes) / _PIECES)
    pieces: list[object] = [None] * len(names)
    for block in range(max(numbers, default=-1) + 1):
        members = [i for i, number in enumerate(numbers) if number == block]
        for i, piece in zip(members, _up_to([sizes[i] for i in members], limit)):
            pieces[i] = (block, piece)
    return _numbered(pieces)


def _up_to(sizes: Sequence[float], limit: float) -> list[int]:
    numbers, used, number = [], 0.0, 0
    for size in sizes:
        if used > 0 and used + size > limit:
            used, number = 0.0, number + 1
        used += size
        numbers.append(number)
    return numbers


def blocks_of(names: Sequence[str]) -> list[str]:
    """Return the name of each parameter's block, given the names of the parameters.

    A block is a member of a numbered container, such as a Sequential ("model.layers.3", "layer1.0"): of the outermost
    one with several members. Other parameters belong to the outermost module that holds no such container
    ("model.embed_tokens"). Names inserted by wrappers (torch.compile, DistributedDataParallel) are ignored.
    """
    paths = [tuple(without_wrappers(name).split(".")[:-1]) for name in names]
    children: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for place, part in enumerate(path):
            if part.isdigit():
                children[path[:place]].add(part)
    ends = [_member(path, children) for path in paths]
    opened = {path[:place] for path, end in zip(paths, ends) if end for place in range(end)}
    return [".".join(path[: end or _depth(path, opened)]) for path, end in zip(paths, ends)]


def _member(path: Path, children: Mapping[Path, set[str]]) -> int:
    """Return how many parts of a path name its block, if that is a member of a numbered container; else 0."""
    enough = 2
    for place, part in enumerate(path):
        if not part.isdigit():
            continue
        if len(children[path[:place]]) >= enough:
            nested = place == 0 and len(path) > 1 and path[1].isdigit()  # a container of containers
            return place + 1 + nested
        enough = 4  # within a container's only member: the 2 parts of a ResNet shortcut are not blocks
    return 0


def _depth(path: Path, opened: Set[Path]) -> int:
    """Return how many parts of a path name the outermost module that holds no block (`opened`: modules that do)."""
    return next((place + 1 for place in range(len(path)) if path[: place + 1] not in opened), len(path))
