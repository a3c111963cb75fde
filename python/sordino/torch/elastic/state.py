"""States of values, models and optimizers: saved in memory, restored to the last commit, and synchronized among ranks.

A state has a part for each value, which knows how to copy, restore and send it (parts.py, handlers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sordino.errors import NoQuorum, UsageError
from sordino.runtime.context import current
from sordino.runtime.process_set import global_process_set
from sordino.runtime.recovery.losses import together
from sordino.torch.elastic.commits import HostsUpdatedInterrupt, RankReport, State
from sordino.torch.elastic.handlers import (
    Handled,
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    get_handler_registry,
    part_of,
    set_handler_registry,
)
from sordino.torch.elastic.parts import Attributes, Part, sharing_of
from sordino.torch.elastic.snapshot import Snapshot
from sordino.torch.functions import broadcast_object
from sordino.torch.optimizer import DistributedOptimizer

__all__ = [
    "HostsUpdatedInterrupt",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class ObjectState(State):
    """Attributes of any kind, by keyword: `ObjectState(epoch=0, batch=0)`.

    They are copied by `copy.deepcopy`, and pickled when they are synchronized: see `broadcast_object` about trust.

    Args:
        bcast_object: None or `hvd.broadcast_object`; or a function that is called on all ranks with a dict of the
            attributes, and returns the dict for all ranks.
        get_rank: see `State`.
        attributes: attributes by name.

    Raises:
        UsageError: the state uses a name itself, or a value cannot be copied.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name in attributes:
            if name.startswith("_") or hasattr(type(self), name):
                raise UsageError(
                    f"{type(self).__name__}({name}=...): the state uses this name itself; use another name"
                )
        for name in sorted(attributes):
            super().__setattr__(name, attributes[name])
            part = self._part_of(attributes[name])
            self._parts[name] = Attributes(self, [name]) if part is None else part
            self._first_copy(name)

    def _part_of(self, value: Any) -> Part[Any] | None:
        """Return the part for a value; None for a plain attribute."""
        return None

    def _first_copy(self, name: str) -> None:
        part = self._parts[name]
        try:
            part.keep(part.read())
        except (TypeError, NotImplementedError) as error:  # copy.deepcopy raises these for a lock, a generator, a file
            found = type(getattr(self, name)).__name__
            raise UsageError(f"{type(self).__name__}({name}=...): a {found} cannot be copied ({error})") from error

    def save(self) -> None:
        read = [(part, part.read()) for part in self._parts.values()]
        for part, values in read:
            part.keep(values)

    def restore(self) -> None:
        for part in self._parts.values():
            part.restore()

    def sync(self) -> None:
        """Make the state equal on all ranks, as far as its values are shared. Collective.

        The first time, all ranks take rank 0's state. Later, a rank that has not synchronized yet takes the state of
        the first rank that has. The other ranks take shared values from that rank. A model that differs between ranks
        because of its optimizer's algorithm is kept, with the optimizer's state. Within a group that averages
        gradients, all ranks take the model of the group's first rank. Everything is received before anything is
        replaced.
        """
        reports, received = together(current(), global_process_set, self._receive_all)
        rank = [one.token for one in reports].index(self._token)
        for part, snapshot in zip(self._parts.values(), received):
            part.install(snapshot, rank, len(reports))
        if self._size is None:
            self._size = len(reports)  # else `rejoin` has set it. After a loss since then the next commit interrupts
        self._version = max(one.version for one in reports) + 1

    def _receive_all(self) -> tuple[list[RankReport], list[Snapshot]]:
        """Return the messages of all ranks, and a snapshot of each part for this rank.

        It changes nothing, so it can be repeated.
        """
        reports = self._exchange("sync")
        if current().losses.unsettled and all(one.version == 0 for one in reports):
            raise NoQuorum(
                "all ranks that had the state of the job were lost before this process, which has joined, received it"
            )
        self._hear(reports, strict=False)
        self.save()
        versions = [one.version for one in reports]
        own = {} if self._bcast_object is broadcast_object else self._received_by_users_function()
        return reports, [own.get(name) or self._receive(name, part, versions) for name, part in self._parts.items()]

    def _received_by_users_function(self) -> dict[str, Snapshot]:
        """Return snapshots of this rank's plain attributes, from the user's function."""
        plain = [part for part in self._parts.values() if isinstance(part, Attributes)]
        values = {name: value for part in plain for name, value in part.outgoing().tree().items()}
        return {name: Snapshot.of({name: value}) for name, value in self._bcast_object(values).items()}

    def _receive(self, name: str, part: Part[Any], versions: Sequence[int]) -> Snapshot:
        """Return this rank's snapshot of a part: its own, or another rank's."""
        if isinstance(part, Handled):
            return part.outgoing()  # its handler synchronizes it
        optimizers = [one for one in map(self.__dict__.get, self._parts) if isinstance(one, DistributedOptimizer)]
        sharing = sharing_of(getattr(self, name), optimizers)
        all_ranks, group, label = sharing.all_ranks, sharing.group, f"elastic.{name}"
        mine, ranks = part.outgoing(), all_ranks.ranks or []
        if current().rank not in ranks:
            return mine
        first = max(ranks, key=lambda rank: (versions[rank], -rank))
        if group is not None and group.process_set_id == all_ranks.process_set_id:
            return mine.received(first, all_ranks, label)
        late = [rank for rank in ranks if versions[rank] == 0]
        if late:
            theirs = mine.received(first, all_ranks, label)
            mine = theirs if self._version == 0 else mine
        if group is not None and len(late) < len(ranks):
            members = group.ranks or []
            mine = mine.received(max(members, key=lambda rank: (versions[rank], -rank)), group, f"{label}.group")
        return mine


class TorchState(ObjectState):
    """State of a model, its optimizer, and other values of the training, by keyword.

    Modules, optimizers, schedulers, `GradScaler` and other objects with `state_dict` and `load_state_dict` are saved by
    their state, and `ElasticSampler` by its processed indices. A value with a user's handler (`set_handler_registry`)
    is saved by the handler. All other values are attributes, as in `ObjectState`. With an optimizer whose ranks keep
    shards of its state (`LocalSGD`), making, saving, restoring and committing are collective.

    Args:
        model: a module, or None.
        optimizer: plain or `DistributedOptimizer`, or None.
        others: more of these objects, and attributes.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        super().__init__(model=model, optimizer=optimizer, **others)

    def _part_of(self, value: Any) -> Part[Any] | None:
        return part_of(value)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        As in Horovod, a new model, optimizer or similar object that replaces another one is saved at once.
        """
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", ()):
            old = self._parts[name]
            if isinstance(old, Handled):
                old.handler.set_value(value)
                return
            part = part_of(value)
            if part is not None:
                self._parts[name] = part
                self._first_copy(name)
            elif not isinstance(old, Attributes):
                self._parts[name] = Attributes(self, [name])
                self._first_copy(name)
