"""Communication of Python objects, which are pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from sordino.errors import UsageError
from sordino.runtime.collectives.autograd import allgather
from sordino.runtime.collectives.ops import broadcast_
from sordino.runtime.context import current
from sordino.runtime.devices import HOST
from sordino.runtime.process_set import ProcessSet, global_process_set
from sordino.runtime.recovery.losses import together

try:
    import cloudpickle as _pickler
except ImportError:  # pickle handles everything except lambdas and local classes
    _pickler = pickle


class Root:
    """The rank that sends. Its number may change when other ranks are lost."""

    def __init__(self, rank: int) -> None:
        self._context = current()
        identities = self._context.identities
        if not 0 <= rank < len(identities):
            raise UsageError(f"root_rank={rank}: must be a rank from 0 to {len(identities) - 1}")
        self._identity = identities[rank]

    @property
    def rank(self) -> int:
        """Its current rank. Raises PeerLost if it is lost."""
        return self._context.rank_of(self._identity, "the root rank")

    @property
    def here(self) -> bool:
        """Whether this rank is the root."""
        return self._context.identity == self._identity


def _to_bytes(obj: Any) -> torch.Tensor:
    buffer = io.BytesIO()
    _pickler.dump(obj, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send a Python object from `root_rank` and return it on every rank (on the root: `obj` itself). Collective.

    The other ranks unpickle it, which can run code there. Only ranks of one job can communicate.

    Args:
        obj: the object on the root; ignored on other ranks, which may pass None.
        root_rank: the world rank that sends.
        name: needed only if ranks make several such calls in different orders.
        process_set: the ranks that take part.
    """
    context, root = current(), Root(root_rank)
    label = name if name is not None else context.names.plan("broadcast_object", process_set.process_set_id)

    def work() -> Any:
        payload = _to_bytes(obj) if root.here else torch.empty(0, dtype=torch.uint8, device=HOST)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device=HOST)
        broadcast_(length, root.rank, name=f"{label}.length", process_set=process_set)
        if not root.here:
            payload = torch.empty(int(length), dtype=torch.uint8, device=HOST)
        broadcast_(payload, root.rank, name=f"{label}.data", process_set=process_set)
        return obj if root.here else _from_bytes(payload)

    return together(context, process_set, work)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks in rank order. Collective. See `broadcast_object` about unpickling.

    Args:
        obj: this rank's object.
        name: needed only if ranks make several such calls in different orders.
        process_set: the ranks that take part.
    """
    label = name if name is not None else current().names.plan("allgather_object", process_set.process_set_id)
    payload = _to_bytes(obj)

    def work() -> list[Any]:
        lengths = allgather(
            torch.tensor([payload.numel()], device=HOST), name=f"{label}.length", process_set=process_set
        )
        everything = allgather(payload, name=f"{label}.data", process_set=process_set)
        return [_from_bytes(part) for part in torch.split(everything, lengths.tolist())]

    return together(current(), process_set, work)
