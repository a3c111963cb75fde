"""Comparison of the ranks' models and settings, when an optimizer first meets the other ranks.

The ranks must have the same layout of the model and the same settings. The comparison has the same name and shape on
all ranks even if models or settings differ, so it cannot hang.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from sordino import fingerprint
from sordino._core import __version__
from sordino.errors import LayoutMismatch
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.collectives.objects import allgather_object
from sordino.runtime.context import Context
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet
from sordino.runtime.tensors import label

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def fingerprint_of(algorithm: DataclassInstance, settings: dict[str, Any]) -> fingerprint.Fingerprint:
    """Return the fingerprint of an optimizer.

    Each field of the algorithm is a separate setting, so that an error shows only fields that differ.
    """
    label = type(algorithm).__name__
    found = {"Sordino": f"Sordino {__version__}", "algorithm": label}
    for part in fields(algorithm):
        found[f"{label}.{part.name}"] = f"{label}({part.name}={getattr(algorithm, part.name)!r})"
    return found | {name: f"{name}={value}" for name, value in settings.items()}


class SettingsCheck:
    """Check that the ranks of an optimizer have the same model and settings.

    Args:
        mine: fingerprint of this rank's optimizer.
        names: names of `tensors`.
        tensors: parameters, and buffers that are exchanged with them.
        process_set: the ranks.
        trained: number of leading tensors for which the comparison includes whether they are frozen.
    """

    def __init__(
        self,
        mine: fingerprint.Fingerprint,
        names: Sequence[str],
        tensors: Sequence[torch.Tensor],
        process_set: ProcessSet,
        trained: int = 0,
    ) -> None:
        self._trained = trained
        self._mine = mine
        self._names, self._tensors = names, tensors
        self._process_set = process_set
        self.name = ""
        """Name of this check, the same on all ranks; "" until they have met. It stays when they meet again, because
        operations named after it may have begun before a loss on one rank and after it on another."""
        self._met = False

    def meet(self, context: Context, frozen: Iterable[int] | None = None) -> None:
        """Compare with the other ranks, unless that has been done. Collective.

        Args:
            context: the context of this rank.
            frozen: indices of the parameters that count as frozen; None: the parameters that are frozen now.

        Raises:
            ConfigurationMismatch: settings differ. Raised on all ranks.
            LayoutMismatch: models differ. Raised on all ranks.
        """
        if self._met:
            return
        name = context.names.plan("agreement", self._process_set.process_set_id)
        model = self._model(frozen)
        said = json.dumps([self._mine, model]).encode()
        digest = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big", signed=True)
        digests = allgather(torch.tensor([digest], device=HOST), name=name, process_set=self._process_set)
        if bool((digests != digest).any()):
            self._explain(name, model)
        self.name, self._met = self.name or name, True

    def lines(self) -> list[str]:
        """Return lines about the model and the settings, which must be the same on all ranks."""
        return [*self._mine.values(), *self._model()]

    def _model(self, frozen: Iterable[int] | None = None) -> list[str]:
        if frozen is None:
            frozen = [index for index, tensor in enumerate(self._tensors) if not tensor.requires_grad]
        marked = {index for index in frozen if index < self._trained}
        return [
            f"{label(name, tensor)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            + " frozen" * (index in marked)
            for index, (name, tensor) in enumerate(zip(self._names, self._tensors))
        ]

    def part(self) -> None:
        """Make the next `meet()` compare again."""
        self._met = False

    def _explain(self, name: str, model: list[str]) -> None:
        """Raise the error that shows the differences. Collective."""
        ranks = self._process_set.ranks or []
        mine = (fingerprint.encode(self._mine), model)
        gathered = allgather_object(mine, name=f"{name}.said", process_set=self._process_set)
        fingerprint.compare(ranks, [fingerprint.decode(text, rank) for rank, (text, _) in zip(ranks, gathered)])
        models: list[list[str]] = [lines for _, lines in gathered]
        for index in range(max(map(len, models))):
            found = [lines[index] if index < len(lines) else "nothing" for lines in models]
            if len(set(found)) > 1:
                owners = fingerprint.by_value(ranks, [f"'{line}'" for line in found])
                where = ", ".join(f"{line} on {fingerprint.rank_list(those)}" for line, those in owners.items())
                raise LayoutMismatch(f"ranks wrap different models: tensor {index} is {where}")
