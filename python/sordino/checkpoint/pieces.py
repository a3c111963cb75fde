"""A state in parts: each shard holds ranges of tensors, and together they make the whole, however many there are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from sordino.errors import UsageError

_MARK = "sordino_piece"


@dataclass(frozen=True)
class Piece:
    """Some of the elements of a tensor.

    Attributes:
        values: they, in one dimension.
        begin: the number of the first, counted row by row.
        shape: of the whole tensor.
    """

    values: torch.Tensor
    begin: int
    shape: tuple[int, ...]


def share(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """What rank `rank` of `size` has to save of a state that all of them have: an equal part of the elements.

    The elements of all tensors, one behind the other, are cut into `size` ranges. All else is in every share.

    Raises:
        UsageError: there is no such rank.
    """
    if not 0 <= rank < size:
        raise UsageError(f"share(rank={rank}, size={size}): the rank must be from 0 to {size - 1}")
    total = 0

    def count(tensor: torch.Tensor) -> None:
        nonlocal total
        total += tensor.numel()

    _mapped(state, count)
    first, last, passed = total * rank // size, total * (rank + 1) // size, 0

    def cut(tensor: torch.Tensor) -> Piece:
        nonlocal passed
        begin, end = (min(max(edge - passed, 0), tensor.numel()) for edge in (first, last))
        passed += tensor.numel()
        # A copy, for a view would be saved with all that it is a view of.
        return Piece(tensor.detach().reshape(-1)[begin:end].clone(), begin, tuple(tensor.shape))

    return cast("dict[str, Any]", _mapped(state, cut))


def encoded(value: Any) -> Any:
    """The same without `Piece`s, which a file cannot hold."""
    if isinstance(value, Piece):
        return {_MARK: value.values, "begin": value.begin, "shape": list(value.shape)}
    return _each(value, encoded)


def joined(parts: Sequence[Any], where: str) -> Any:
    """The whole of encoded parts. Dicts are united; what is no piece and in several parts must be the same in all.

    Raises:
        UsageError: pieces overlap or leave a gap, or parts contradict each other; `where` names the value.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise UsageError(f"{where} differs between shards in its type")
    if isinstance(first, dict):
        if _MARK in first:
            return _assembled(parts, where)
        keys = list(dict.fromkeys(key for part in parts for key in part))
        whole = {key: joined([part[key] for part in parts if key in part], f"{where}[{key!r}]") for key in keys}
        return OrderedDict(whole) if isinstance(first, OrderedDict) else whole
    if isinstance(first, (list, tuple)):
        if any(len(part) != len(first) for part in parts):
            raise UsageError(f"{where} differs between shards in its length")
        items = [joined(items, f"{where}[{index}]") for index, items in enumerate(zip(*parts))]
        return type(first)(items)
    if any(not _same(part, first) for part in parts):
        raise UsageError(f"{where} differs between shards")
    return first


def _assembled(pieces: Sequence[dict[str, Any]], where: str) -> torch.Tensor:
    shape, kind = pieces[0]["shape"], pieces[0][_MARK].dtype
    if any(piece["shape"] != shape or piece[_MARK].dtype != kind for piece in pieces):
        raise UsageError(f"{where}: its pieces are of tensors of different shapes or dtypes")
    whole, filled = torch.empty(shape, dtype=kind).reshape(-1), 0
    for piece in sorted(pieces, key=lambda piece: (piece["begin"], piece[_MARK].numel())):
        values = piece[_MARK]
        if values.numel() == 0:
            continue
        if piece["begin"] != filled or filled + values.numel() > whole.numel():
            raise UsageError(f"{where}: its pieces overlap or leave a gap at element {min(filled, piece['begin'])}")
        whole[filled : filled + values.numel()] = values
        filled += values.numel()
    if filled != whole.numel():
        raise UsageError(f"{where}: elements {filled} to {whole.numel() - 1} are in no shard")
    return whole.reshape(shape)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))  # a NaN equals itself
    return bool(a == b) or (a != a and b != b)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    return change(value) if isinstance(value, torch.Tensor) else _each(value, lambda item: _mapped(item, change))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with each of its values changed; all else as it is."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, change(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
