"""Copies of nested state. A new copy reuses the memory of the last one: each tensor is copied once, nothing is pickled.

A tree (dicts, lists and tuples of any values) is divided into a list of its tensors and the rest, in which a `_Place`
stands for each tensor. So one call copies all tensors, and another rank receives the rest first, then each tensor. For
sending, everything except tensors is pickled.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.context import current
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.views import movable
from sordino.torch.functions import broadcast_object

_DICTS = (dict, OrderedDict, defaultdict)


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in a tree, with all that a rank must know to receive it."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str  # not the whole device: ranks may number their devices differently


class Snapshot:
    """Copy of a tree."""

    def __init__(self) -> None:
        self._rest: Any = None
        self._tensors: list[torch.Tensor] = []

    @classmethod
    def of(cls, tree: Any) -> Snapshot:
        """Return a copy of this tree."""
        snapshot = cls()
        snapshot.take(tree)
        return snapshot

    @torch.no_grad()
    def take(self, tree: Any) -> None:
        """Replace the copy. If a value of the tree cannot be copied, the old copy is kept.

        Args:
            tree: the tree. Tensors are copied into the snapshot's memory, dicts, lists and tuples are copied part by
                part, all other values by `copy.deepcopy`.
        """
        found: list[torch.Tensor] = []

        def place(value: Any) -> Any:
            if not _is_plain(value):
                return copy.deepcopy(value)
            found.append(value.detach())
            return _Place(len(found) - 1, tuple(value.shape), value.dtype, value.device.type)

        rest = _mapped(tree, place)
        if not _alike(self._tensors, found):
            self._tensors = [tensor.clone() for tensor in found]
        elif found:
            torch._foreach_copy_(self._tensors, found)
        self._rest = rest

    def tree(self, own_tensors: bool = True) -> Any:
        """Return the copy as a tree like the original one.

        Args:
            own_tensors: whether the caller may keep and change the tensors. Otherwise they are the snapshot's.
        """

        def fill(value: Any) -> Any:
            if not isinstance(value, _Place):
                return copy.deepcopy(value)
            tensor = self._tensors[value.number]
            return tensor.clone() if own_tensors else tensor

        return _mapped(self._rest, fill)

    def received(self, root: int, process_set: ProcessSet, name: str) -> Snapshot:
        """Return world rank `root`'s snapshot: this one on that rank, a new one on the others. Collective over the set.

        Everything except tensors is pickled, and unpickled on the other ranks. See `broadcast_object` about trust.
        """
        context = current()
        rest = broadcast_object(self._rest, root, name=f"{name}.rest", process_set=process_set)
        result = self
        if context.rank != root:
            result = Snapshot()
            result._rest = rest
            places: list[_Place] = []
            _mapped(rest, lambda value: places.append(value) if isinstance(value, _Place) else None)
            result._tensors = [
                torch.empty(place.shape, dtype=place.dtype, device=place.device_type) for place in places
            ]
        for number, tensor in enumerate(result._tensors):
            broadcast_(movable(tensor), root, name=f"{name}.{number}", process_set=process_set)
        return result


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided


def _alike(kept: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    return len(kept) == len(found) and all(
        mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device
        for mine, theirs in zip(kept, found)
    )


def _mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return the tree with `function` applied to each leaf, always in the same order."""
    if type(tree) in _DICTS:
        result = copy.copy(tree)  # keeps attributes, such as those of a state_dict()
        for key, value in tree.items():
            result[key] = _mapped(value, function)
        return result
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, function) for value in tree)
    return function(tree)
