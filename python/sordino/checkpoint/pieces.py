"""States in parts: each shard holds ranges of tensors. Together, any number of shards form the complete state."""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from sordino.checkpoint.files import check, shown
from sordino.errors import UsageError
from sordino.runtime.exchange.saved_residuals import BY_RANK

_MARK = "sordino_piece"
_OFTEN = 4  # largest size of pieces relative to their file; above 1, because tensors may share memory in a file


@dataclass(frozen=True)
class Piece:
    """Range of the elements of a tensor.

    Attributes:
        values: the elements, in one dimension.
        begin: index of the first element, in row-major order.
        shape: shape of the whole tensor.
    """

    values: torch.Tensor
    begin: int
    shape: tuple[int, ...]


def share(state: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the part of a state that rank `rank` of `size` has to save, if all ranks have the state.

    The elements of all dense tensors, one after the other, are cut into `size` ranges of almost equal length. All
    other values, also sparse tensors, are in every part. Values in a dict under the key "by_rank" belong to one rank
    each, by its number, such as the residuals in `DistributedOptimizer.state_dict()`. Each rank saves its own values
    whole, and `Folder.load` unites them.

    Raises:
        UsageError: there is no such rank, or the state contains itself or is nested more deeply than a checkpoint can
            be.
    """
    if not 0 <= rank < size:
        raise UsageError(f"share(rank={rank}, size={size}): the rank must be from 0 to {size - 1}")
    check(state, besides=(object,))
    total = 0

    def count(tensor: torch.Tensor) -> None:
        nonlocal total
        total += tensor.numel()

    _mapped(state, count, lambda tensor: tensor)
    first, last, passed = total * rank // size, total * (rank + 1) // size, 0

    def cut(tensor: torch.Tensor) -> Piece:
        nonlocal passed
        begin, end = (min(max(edge - passed, 0), tensor.numel()) for edge in (first, last))
        passed += tensor.numel()
        # A copy, because a view would be saved with the whole memory behind it.
        return Piece(tensor.detach().reshape(-1)[begin:end].clone(), begin, tuple(tensor.shape))

    def whole(tensor: torch.Tensor) -> Piece:
        return Piece(tensor.detach().reshape(-1).clone(), 0, tuple(tensor.shape))

    return cast("dict[str, Any]", _mapped(state, cut, whole))


def encoded(value: Any) -> Any:
    """Return the value with its `Piece`s converted to dicts, because a file cannot hold them.

    Raises:
        UsageError: a piece is not a part of a tensor, or a dict looks like a piece.
    """
    if isinstance(value, Piece):
        shape = list(value.shape) if isinstance(value.shape, tuple) else value.shape
        piece = {_MARK: value.values, "begin": value.begin, "shape": shape}
        if not _is_piece(piece):
            raise UsageError(
                f"Piece(values={_outline(value.values)}, begin={value.begin!r}, shape={value.shape!r}): values must be "
                "a contiguous dense tensor of one dimension, and lie within a tensor of that shape from begin on"
            )
        return piece
    if isinstance(value, dict) and _MARK in value:
        raise UsageError(f"a dict in the state has the key {_MARK!r}, which marks pieces in shards; rename it")
    return _each(value, encoded)


def _outline(values: object) -> str:
    if isinstance(values, torch.Tensor):
        return f"a tensor of shape {tuple(values.shape)}"
    return f"a {type(values).__qualname__}"


def checked(part: dict[str, Any], size: int, source: str) -> dict[str, Any]:
    """Return an encoded part as it was read, after checking that its pieces are valid.

    Args:
        part: a part that was read from a checkpoint, so its depth and number of values are limited.
        size: bytes of its file. Pieces are copied when they are joined, so their data must have been in the file.
        source: name of the file, for errors.

    Raises:
        UsageError: a piece is invalid.
    """
    held = 0
    left: list[Any] = [part]
    while left:
        value = left.pop()
        if isinstance(value, dict) and _MARK in value:
            held += _bytes_of_piece(value, source)
        elif isinstance(value, dict):
            left += value.values()
        elif isinstance(value, (list, tuple)):
            left += value
    if held > _OFTEN * size:
        raise UsageError(
            f"{source}: not a shard written by sordino.checkpoint: {held} bytes of pieces in a file of {size}"
        )
    return part


def _bytes_of_piece(piece: dict[str, Any], source: str) -> int:
    if not _is_piece(piece):
        raise UsageError(f"{source}: not a shard written by sordino.checkpoint: it has an invalid piece of a tensor")
    return int(piece[_MARK].nbytes)


def _is_piece(piece: dict[str, Any]) -> bool:
    values, begin, shape = (piece.get(name) for name in (_MARK, "begin", "shape"))
    return (
        len(piece) == 3
        and isinstance(values, torch.Tensor)
        and values.layout == torch.strided
        and not (values.is_quantized or values.is_nested)
        and values.dim() == 1
        and values.is_contiguous()
        and type(begin) is int
        and isinstance(shape, list)
        and all(type(size) is int and 0 <= size < 1 << 63 for size in shape)
        and 0 <= begin <= begin + values.numel() <= math.prod(shape)
        and math.prod(size for size in shape if size) < 1 << 63  # if one is 0, torch multiplies the others
    )


class Summary(NamedTuple):
    """Short description of an encoded part, for a cheap test whether parts form a complete state.

    The sum of edge(end) - edge(begin) over some ranges, with a random number for each edge, is edge(n) - edge(0) only
    if all other edges cancel out. The ranges, which all go forward, then lead from 0 to n without gap or overlap.

    Attributes:
        digest: digest of the part without the values and ranges of pieces, and without values that belong to one rank.
        covered: the sum over the ranges of its pieces.
        whole: this sum for pieces that are whole tensors.
        own: places and keys of its values that belong to one rank.
    """

    digest: bytes
    covered: int
    whole: int
    own: list[tuple[int, str]]


def summary(part: dict[str, Any]) -> Summary:
    """Return the summary of an encoded part."""
    covered = whole = 0
    pieces, places = itertools.count(), itertools.count()  # in the same order on all ranks with the same digest
    own: list[tuple[int, str]] = []

    def described(value: Any) -> Any:
        nonlocal covered, whole
        if isinstance(value, dict) and _MARK in value:
            number, begin, values = next(pieces), value["begin"], value[_MARK]
            covered += _edge(number, begin + values.numel()) - _edge(number, begin)
            whole += _edge(number, math.prod(value["shape"])) - _edge(number, 0)
            return value["shape"], str(values.dtype)
        if isinstance(value, dict) and BY_RANK in value:
            place = next(places)
            own.extend((place, repr(key)) for key in value[BY_RANK])
            value = {**value, BY_RANK: None}
        return _each(value, described)

    description = pickle.dumps(described(part))
    return Summary(hashlib.blake2b(description, digest_size=16).digest(), covered, whole, own)


def _edge(piece: int, element: int) -> int:
    """Return the number of an edge of a range of the elements of a tensor."""
    return int.from_bytes(hashlib.blake2b(f"{piece} {element}".encode(), digest_size=16).digest(), "little")


def make_a_whole(summaries: Sequence[Summary]) -> bool:
    """Return whether parts with these summaries certainly form a complete state. Otherwise `joined` decides."""
    first, own = summaries[0], [place for one in summaries for place in one.own]
    return (
        all(one.digest == first.digest for one in summaries)
        and sum(one.covered for one in summaries) == first.whole
        and len(set(own)) == len(own)
    )


def outline(value: Any) -> Any:
    """Return an encoded part whose pieces have no values, for `joined` to test whether parts form a complete state."""
    if isinstance(value, dict) and _MARK in value:
        return {**value, _MARK: torch.empty_like(value[_MARK], device="meta")}
    return _each(value, outline)


def joined(parts: Sequence[Any], where: str) -> Any:
    """Return the complete state of encoded parts.

    Dicts are united. A value that is not a piece must be the same in all parts that have it.

    Raises:
        UsageError: pieces overlap or leave a gap, or parts contradict each other. `where` names the value.
    """
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise UsageError(f"{where} differs between shards in its type")
    if type(first) in (dict, OrderedDict):
        if _MARK in first:
            if not all(_MARK in part for part in parts):
                raise UsageError(f"{where} is a piece of a tensor in some shards only")
            return _assembled(parts, where)
        keys = list(dict.fromkeys(key for part in parts for key in part))
        whole = {key: joined([part[key] for part in parts if key in part], f"{where}[{shown(key)}]") for key in keys}
        return OrderedDict(whole) if isinstance(first, OrderedDict) else whole
    if isinstance(first, (list, tuple)):
        if any(len(part) != len(first) for part in parts):
            raise UsageError(f"{where} differs between shards in its length")
        items = [joined(items, f"{where}[{index}]") for index, items in enumerate(zip(*parts))]
        return type(first)(items)
    try:
        differs = any(not _same(part, first) for part in parts)
    except RuntimeError as error:  # some kinds of tensors do not support this
        raise UsageError(f"{where} is in several shards, but cannot be compared ({error})") from error
    if differs:
        raise UsageError(f"{where} differs between shards")
    return first


def _assembled(pieces: Sequence[dict[str, Any]], where: str) -> torch.Tensor:
    shape, dtype = pieces[0]["shape"], pieces[0][_MARK].dtype
    if any(piece["shape"] != shape or piece[_MARK].dtype != dtype for piece in pieces):
        raise UsageError(f"{where}: its pieces are of tensors of different shapes or dtypes")
    total, filled = math.prod(shape), 0
    found = [piece for piece in pieces if piece[_MARK].numel()]
    found.sort(key=lambda piece: (piece["begin"], piece[_MARK].numel()))
    for piece in found:
        count = piece[_MARK].numel()
        if piece["begin"] != filled or filled + count > total:
            raise UsageError(f"{where}: its pieces overlap or leave a gap at element {min(filled, piece['begin'])}")
        filled += count
    if filled != total:
        raise UsageError(f"{where}: elements {filled} to {total - 1} are in no shard")
    # Allocated only now that all its elements are known to exist, because a shape in a file can be anything.
    whole = torch.cat([piece[_MARK] for piece in found]) if found else torch.empty(0, dtype=dtype, device="cpu")
    return whole.reshape(shape)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b) or (a != a and b != b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != b.layout or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.layout == torch.sparse_coo:
        a, b = a.coalesce(), b.coalesce()
        return _same_tensors(a.indices(), b.indices()) and _same_tensors(a.values(), b.values())
    if a.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [(one.crow_indices(), one.col_indices(), one.values()) for one in (a, b)]
        return all(map(_same_tensors, *parts))
    if a.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [(one.ccol_indices(), one.row_indices(), one.values()) for one in (a, b)]
        return all(map(_same_tensors, *parts))
    for dimension in range(a.dim()):
        if a.stride(dimension) == b.stride(dimension) == 0 and a.shape[dimension]:
            a, b = a.narrow(dimension, 0, 1), b.narrow(dimension, 0, 1)  # compare repeated values only once
    if any(one.nbytes > _OFTEN * one.untyped_storage().nbytes() for one in (a, b)):
        raise RuntimeError("its elements share memory")
    return torch.equal(_bits(a), _bits(b))  # a NaN equals itself


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() == 1:  # its stride may be anything
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def _mapped(value: Any, change: Callable[[torch.Tensor], Any], change_own: Callable[[torch.Tensor], Any]) -> Any:
    """Return the value with dense tensors replaced by `change`, or by `change_own` if they belong to one rank."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.layout == torch.strided else value
    if type(value) in (dict, OrderedDict) and BY_RANK in value:
        items = ((key, change_own if key == BY_RANK else change, item) for key, item in value.items())
        return type(value)((key, _mapped(item, its, change_own)) for key, its, item in items)
    return _each(value, lambda item: _mapped(item, change, change_own))


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with `change` applied to each of its values; any other value unchanged."""
    if type(value) in (dict, OrderedDict):
        return type(value)((key, change(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    return value
