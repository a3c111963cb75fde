"""What a state is made of: parts that are saved, restored and sent to other ranks, each in its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.torch.arguments import parameters_of
from sordino.torch.elastic.sampler import ElasticSampler, Memento
from sordino.torch.elastic.snapshot import Snapshot
from sordino.torch.optimizer import DistributedOptimizer

Read = TypeVar("Read")


@runtime_checkable
class Stateful(Protocol):
    """Modules, optimizers, schedulers, scalers: what tells its state and takes it."""

    def state_dict(self) -> Any:
        """Return its state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state."""


class Part(ABC, Generic[Read]):
    """A part of a state."""

    def prepare(self) -> None:
        """Do what of reading is collective. What is read next is of this moment."""

    def dismiss(self) -> None:
        """Forget what was prepared: it is not going to be read."""

    def notes(self) -> list[int]:
        """Return what other ranks are to know of this one's part."""
        return []

    def hear(self, notes: Sequence[int]) -> bool:
        """Take another rank's notes, or this one's; False if they do not fit."""
        return True

    @abstractmethod
    def read(self) -> Read:
        """Return the values of now. It may fail, and `keep` not."""

    @abstractmethod
    def keep(self, read: Read) -> None:
        """Save what was read."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to what is saved."""

    @abstractmethod
    def outgoing(self) -> Snapshot:
        """Return what is saved, for other ranks."""

    @abstractmethod
    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        """Take what a rank has sent: save and restore it, on this rank of so many."""


class Attributes(Part[dict[str, Any]]):
    """The plain attributes of an object, of some names."""

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
    """Anything with a `state_dict` and a `load_state_dict`."""

    def __init__(self, value: Stateful) -> None:
        self._value = value
        self._snapshot = Snapshot()
        self._prepared: Any = None

    def prepare(self) -> None:
        # With LocalSGD ranks put the state together from shards; with Layered a step is completed first.
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
        # A module copies what it loads; others may go on to work in it.
        self._value.load_state_dict(self._snapshot.tree(own_tensors=not isinstance(self._value, torch.nn.Module)))

    def outgoing(self) -> Snapshot:
        return self._snapshot

    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        self._snapshot = snapshot
        self.restore()


class Sampling(Part[Memento]):
    """A sampler. Going back keeps its division, for notes are of that; what another rank sends is divided anew."""

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


# ---- who has the same ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharing:
    """Which ranks have the same value between steps.

    Attributes:
        everybody: the ranks that have such a value, the same at first.
        group: those whose values stay equal to this rank's; None where this rank trains a model of its own.
    """

    everybody: ProcessSet = global_process_set
    group: ProcessSet | None = global_process_set


def sharing_of(value: object, optimizers: Sequence[DistributedOptimizer]) -> Sharing:
    """Return who shares a value.

    An optimizer's algorithm decides of it and of a model that it steps, else all ranks do.
    """
    if isinstance(value, torch.nn.Module):
        mine = set(map(id, value.parameters()))
        steppers = [one for one in optimizers if not mine.isdisjoint(map(id, parameters_of(one._inner)))]
    else:
        steppers = [one for one in optimizers if one is value]
    return _sharing_of_models(steppers[0]) if steppers else Sharing()


def _sharing_of_models(optimizer: DistributedOptimizer) -> Sharing:
    """Return who shares a model.

    Models are equal among those who average gradients, which algorithms that average parameters do in groups.
    """
    return Sharing(optimizer._options.process_set, optimizer._strategy.ranks_of_model())
