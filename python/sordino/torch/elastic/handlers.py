"""Horovod's handlers: `TorchState` uses them to save, restore and synchronize values by type. Users can add types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sordino.runtime.context import current
from sordino.runtime.process_set import global_process_set
from sordino.torch.elastic.parts import Loadable, Part, Sampling, Stateful
from sordino.torch.elastic.sampler import ElasticSampler
from sordino.torch.elastic.snapshot import Snapshot
from sordino.torch.functions import allgather_object


class StateHandler:
    """Base class of handlers, which save, restore and synchronize one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the value in memory."""
        raise NotImplementedError(f"{type(self).__name__}.save()")

    def restore(self) -> None:
        """Restore the value that was saved last."""
        raise NotImplementedError(f"{type(self).__name__}.restore()")

    def sync(self) -> None:
        """Replace the value on all ranks by rank 0's. Collective."""
        raise NotImplementedError(f"{type(self).__name__}.sync()")

    def set_value(self, value: Any) -> None:
        """Replace the value, and save the new one."""
        self.value = value
        self.save()


class _PartHandler(StateHandler):
    """Handler that uses the part that `TorchState` makes for the value."""

    def __init__(self, value: Any, make: Callable[[Any], Part[Any]]) -> None:
        super().__init__(value)
        self._make = make
        self._part = make(value)
        self.save()

    def save(self) -> None:
        self._part.prepare()
        self._part.keep(self._part.read())

    def restore(self) -> None:
        self._part.restore()

    def sync(self) -> None:
        self.save()
        context = current()
        received = self._part.outgoing().received(0, global_process_set, f"elastic.{type(self).__name__}")
        self._part.install(received, context.rank, context.size)

    def set_value(self, value: Any) -> None:
        self._part = self._make(value)
        super().set_value(value)


class ModelStateHandler(_PartHandler):
    """Handler of modules, by their `state_dict`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model, Loadable)


class OptimizerStateHandler(_PartHandler):
    """Handler of optimizers, by their `state_dict`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, Loadable)


class SamplerStateHandler(_PartHandler):
    """Handler of `ElasticSampler`. Indices processed by any rank count, and the rest is divided again."""

    def __init__(self, sampler: ElasticSampler) -> None:
        super().__init__(sampler, Sampling)

    def sync(self) -> None:
        for notes in allgather_object(self._part.notes(), name="elastic.SamplerStateHandler.notes"):
            self._part.hear(notes)
        super().sync()


Registry = Sequence[tuple[type, type[StateHandler]]]
_OURS = (ModelStateHandler, OptimizerStateHandler, SamplerStateHandler)
_registry: Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> Registry:
    """Return the types with their handlers. The first type that fits a value is used."""
    return _registry


def set_handler_registry(registry: Registry) -> None:
    """Use these handlers in states that are made from now on.

    A value without a handler is saved by its `state_dict`, or as an attribute.
    """
    global _registry
    _registry = registry


class Handled(Part[None]):
    """Part for a value with a user's handler."""

    def __init__(self, handler: StateHandler) -> None:
        self.handler = handler

    def read(self) -> None:
        """Do nothing, because a handler reads and saves in one call."""

    def keep(self, read: None) -> None:
        self.handler.save()

    def restore(self) -> None:
        self.handler.restore()

    def outgoing(self) -> Snapshot:
        return Snapshot()

    def install(self, snapshot: Snapshot, rank: int, size: int) -> None:
        self.handler.sync()
        self.handler.save()


def part_of(value: object) -> Part[Any] | None:
    """Return the part for a value; None for a plain attribute."""
    handler = next((handler for cls, handler in _registry if isinstance(value, cls)), None)
    if handler is not None and handler not in _OURS:
        return Handled(handler(value))
    if isinstance(value, ElasticSampler):
        return Sampling(value)
    return Loadable(value) if isinstance(value, Stateful) and not isinstance(value, type) else None
