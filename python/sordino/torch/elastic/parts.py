"""Parts of a state. Each kind of part is saved, restored and sent to other ranks in its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from sordino.runtime.context import current
from sordino.runtime.exchange.saved_residuals import with_own
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch.arguments import parameters_of
from sordino.torch.elastic.sampler import ElasticSampler, Memento
from sordino.torch.elastic.snapshot import Snapshot
from sordino.torch.optimizer import DistributedOptimizer

Read = TypeVar("Read")


@runtime_checkable
class Stateful(Protocol):
    """Protocol of modules, optimizers, schedulers and scalers: objects that return a state and load one."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a state."""


class Part(ABC, Generic[Read]):
    """Part of a state.

    A commit calls prepare, then (after all ranks have exchanged notes) hear, read and keep.
    """

    def prepare(self) -> None:
        """Do the collective work of reading. The next `read` returns the values of this moment."""

    def dismiss(self) -> None:
        """Drop the prepared values, because they will not be read."""

    def notes(self) -> list[int]:
        """Return the facts about this rank's part that other ranks must know, as integers."""
        return []

    def hear(self, notes: Sequence[int]) -> bool:
        """Take the notes of a rank, which may be this one. Return False if they do not fit."""
        return True

    @abstractmethod
    def read(self) -> Read:
        """Return the current values. This may fail; `keep` must not."""

    @abstractmethod
    def keep(self, read: Read) -> None:
        """Save values that `read` has returned."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the saved values."""

    @abstractmethod
    def outgoing(self) -> Snapshot:
        """Return the saved values, for other ranks."""

    @abstractmethod
    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        """Save and restore values that a rank has sent. `rank` and `size` are this rank and the number of ranks."""


class Attributes(Part[dict[str, Any]]):
    """Plain attributes of an object, by name."""

    def __init__(self, owner: object, names: Iterable[str]) -> None:
        self._owner = owner
        self._names = list(names)
        self._snapshot = Snapshot()

    def read(self) -> dict[str, Any]:
        return {name: getattr(self._owner, name) for name in self._names}

    def keep(self, read: dict[str, Any]) -> None:
        self._snapshot.take(read)

    def restore(self) -> None:
        for name, value in self._snapshot.tree().items():
            setattr(self._owner, name, value)

    def outgoing(self) -> Snapshot:
        return self._snapshot

    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        self._snapshot = snapshot
        self.restore()


class Loadable(Part[Any]):
    """Part for an object with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._snapshot = Snapshot()
        self._prepared: Any = None

    def prepare(self) -> None:
        # With LocalSGD ranks assemble the state from shards. With Layered a step is completed first.
        if isinstance(self._value, DistributedOptimizer):
            self._prepared = self._value.state_dict()

    def dismiss(self) -> None:
        self._prepared = None

    def read(self) -> Any:
        prepared, self._prepared = self._prepared, None
        return self._value.state_dict() if prepared is None else prepared

    def keep(self, read: Any) -> None:
        self._snapshot.take(read)

    def restore(self) -> None:
        # A module copies what it loads. Other objects may keep the loaded tensors and change them.
        tree = self._snapshot.tree(own_tensors=not isinstance(self._value, torch.nn.Module))
        if isinstance(self._value, DistributedOptimizer):
            tree = with_own(tree, tree, current().rank)
        self._value.load_state_dict(tree)

    def outgoing(self) -> Snapshot:
        return self._snapshot

    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        if isinstance(self._value, DistributedOptimizer) and snapshot is not self._snapshot:
            # Each rank keeps its own residuals.
            own = self._snapshot.tree(own_tensors=False)
            self._snapshot = Snapshot.of(with_own(snapshot.tree(own_tensors=False), own, rank))
        else:
            self._snapshot = snapshot
        self.restore()


class Sampling(Part[Memento]):
    """Part for a sampler. A restore keeps the division, because notes refer to it; `install` divides again."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._memento = sampler.memento()

    def notes(self) -> list[int]:
        return self._sampler.notes()

    def hear(self, notes: Sequence[int]) -> bool:
        return self._sampler.hear(notes)

    def read(self) -> Memento:
        return self._sampler.memento()

    def keep(self, read: Memento) -> None:
        self._memento = read

    def restore(self) -> None:
        self._sampler.revert(self._memento)

    def outgoing(self) -> Snapshot:
        return Snapshot.of(self._sampler.state_dict())

    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        self._sampler.divide_rest_of(snapshot.tree(), rank, size)
        self.keep(self.read())


# ---- ranks with equal values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharing:
    """Ranks that have the same value between steps.

    Attributes:
        all_ranks: the ranks that have such a value, equal at first.
        group: the ranks whose values stay equal to this rank's; None if this rank trains its own model.
    """

    all_ranks: ProcessSet = global_process_set
    group: ProcessSet | None = global_process_set


def sharing_of(value: object, optimizers: Sequence[DistributedOptimizer]) -> Sharing:
    """Return which ranks share a value.

    For an optimizer and a model that it steps, this depends on the optimizer's algorithm. All ranks share other values.
    """
    if isinstance(value, torch.nn.Module):
        mine = set(map(id, value.parameters()))
        steppers = [one for one in optimizers if not mine.isdisjoint(map(id, parameters_of(one._inner)))]
    else:
        steppers = [one for one in optimizers if one is value]
    return _sharing_of_models(steppers[0]) if steppers else Sharing()


def _sharing_of_models(optimizer: DistributedOptimizer) -> Sharing:
    """Return which ranks share an optimizer's model.

    Models are equal among ranks that average gradients. Algorithms that average parameters average gradients in groups.
    """
    return Sharing(optimizer._options.process_set, optimizer._strategy.ranks_of_model())
