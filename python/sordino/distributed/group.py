"""The process group "sordino" of torch.distributed.

If a backend's function returns a `ProcessGroup`, torch calls it for all devices. A group of some ranks is a process set
of the world of all ranks if all of these create it together and torch tells this (2.13 or newer). Otherwise only its
members create it, as a world of its own, whose ranks meet at the store that torch gives to the group. The process set
lives as long as the world, because torch destroys a group only on its members.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.constants import default_pg_timeout

from sordino.distributed.operations import NAME, Operations
from sordino.distributed.place import Place, find_place, is_chosen, world_at
from sordino.distributed.work import torch_error
from sordino.errors import OperationMismatch, SordinoError
from sordino.runtime.context import use
from sordino.runtime.process_set import ProcessSet, new_set_id

dist: Any = torch.distributed  # its annotations lack much of what a backend uses


def make(store: Any, rank: int, size: int, timeout: timedelta, composed: bool) -> Any:
    """Return a group, for `init_process_group`, and for `new_group` of torch before 2.13. Collective over its members.

    Args:
        store: torch's store for this group.
        rank: rank of this process in the group.
        size: number of ranks of the group.
        timeout: time limit of its operations, and for its ranks to meet; torch's default leaves that to
            SORDINO_TIMEOUT_S.
        composed: whether the group has another backend for other devices, so that torch needs a `Backend`.

    Raises:
        ValueError: `sordino.torch.init()` has given this process another rank, or the timeout is not above 0.
        DistBackendError: not all ranks have come in time; the error names them.
    """
    if timeout <= timedelta(0):
        raise ValueError(f"the timeout of a process group must be above 0 s, not {timeout.total_seconds():g} s")
    try:
        place = find_place(store, rank, size, timeout)
    except SordinoError as error:
        raise torch_error(error) from error
    if composed:
        from sordino.distributed.backend import SordinoBackend

        made: Operations = SordinoBackend(place)
    else:
        made = SordinoProcessGroup(place)
    if is_chosen(timeout):
        made.set_timeout(timeout)
    return made


class SordinoProcessGroup(Operations, dist.ProcessGroup):  # type: ignore[misc]
    """A group of ranks of torch.distributed, for tensors of all devices."""

    def __init__(self, place: Place) -> None:
        Operations.__init__(self, place)
        dist.ProcessGroup.__init__(self, self._do.rank, self._do.size)
        self._description = ""

    def getGroupName(self) -> str:
        return self._place.name

    def setGroupName(self, name: str) -> None:
        self._place.name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Any:
        return self._place.store

    @property
    def _device_types(self) -> list[torch.device]:
        """Types of devices whose tensors the group serves. torch.distributed.checkpoint reads them."""
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: Any) -> SordinoProcessGroup:
        """Return the backend for a device, which is the group itself."""
        return self

    @property
    def supports_splitting(self) -> bool:
        """Whether torch creates subgroups by `split_group`. False, because `new_group` creates them as process sets."""
        return False

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here. See `monitored.barrier`; without a timeout, the limit is 30 minutes."""
        self._pass_monitored_barrier(default_pg_timeout if timeout is None else timeout, wait_all_ranks)

    @property
    def new_group(self) -> Callable[..., SordinoProcessGroup | None]:
        """Function that creates subgroups, which torch 2.13 and newer call on the default group.

        The attribute is missing while torch creates a group with another backend, so that torch does this itself. torch
        before 2.14 does not pass the backend, but has it in a local variable.
        """
        caller = sys._getframe(1)
        if caller.f_code.co_name == "_new_group_with_tag":
            backend = str(caller.f_locals.get("backend", NAME))
            if {part.rpartition(":")[2] for part in backend.split(",")} != {NAME}:
                raise AttributeError(f"torch makes a group with the backend {backend} itself")
        return self._new_group

    def _new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
        backend: str = NAME,
    ) -> SordinoProcessGroup | None:
        """Return a group of some ranks; None on others. torch 2.14 and newer pass the backend, which is this one."""
        members = list(ranks)
        # torch's name of a group is a number if all ranks create the group together, and otherwise a hash.
        if not (group_name.isdecimal() and members == sorted(members)):
            return self.split_group(members, timeout, None, group_name, group_desc)
        try:
            with use(self._place.context):
                process_set = ProcessSet(members)
                process_set.process_set_id = new_set_id(members)
        except OperationMismatch:
            # Ranks of different groups may create different subgroups at the same time (`new_subgroups(group=...)`).
            return self.split_group(members, timeout, None, group_name, group_desc)
        except SordinoError as error:
            raise torch_error(error) from error
        if self._do.rank not in members:
            return None
        place = Place(self._place.context, self._place.store, process_set, name=group_name)
        return self._made(place, timeout, group_desc)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> SordinoProcessGroup | None:
        """Return a group of some of this group's ranks; None on others. Only the new group's ranks have to call it.

        Args:
            new_ranks: numbers in this group, in the order of the ranks in the new group.
            timeout: time limit of its operations, and for its ranks to meet.
            opts: not used; other backends' options are not this backend's.
            group_name: name of the new group, which no other group of the same ranks has.
            group_desc: description.
            device_types: not used, because a group serves all devices.
        """
        members, rank = list(new_ranks), self._do.rank
        if rank not in members:
            return None
        name = group_name or "split " + "-".join(map(str, members))
        store = dist.PrefixStore(f"sordino/group {name} of {members}", self._place.store)
        try:
            context, store = world_at(store, members.index(rank), len(members), timeout)
        except SordinoError as error:
            raise torch_error(error) from error
        return self._made(Place(context, store, owns=True, name=name), timeout, group_desc)

    @staticmethod
    def _made(place: Place, timeout: timedelta | None, description: str | None) -> SordinoProcessGroup:
        made = SordinoProcessGroup(place)
        made.setGroupDesc(description or "")
        if timeout is not None and is_chosen(timeout):
            made.set_timeout(timeout)
        return made
