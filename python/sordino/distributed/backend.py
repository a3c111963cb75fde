"""The backend "sordino" for CPU tensors in a group that has other backends for other devices: "cpu:sordino,cuda:nccl".

torch 2.14 and newer accept a `Backend` that is written in Python. Each call passes through torch's dispatcher, which
chooses the backend by the tensor's device. Subgroups are worlds of their own, because torch lets only their members
make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed
from torch._C import _distributed_c10d
from torch.distributed.constants import default_pg_timeout

from sordino.distributed.operations import NAME, Operations
from sordino.distributed.place import Place, world_at
from sordino.distributed.work import torch_error
from sordino.errors import SordinoError

dist: Any = torch.distributed  # its annotations lack much of what a backend uses
Backend: Any = _distributed_c10d.Backend


class SordinoBackend(Operations, Backend):  # type: ignore[misc]
    """The part of a process group that serves the tensors of some devices. Needs torch 2.14."""

    def __init__(self, place: Place) -> None:
        Operations.__init__(self, place)
        Backend.__init__(self, self._do.rank, self._do.size)

    @property
    def options(self) -> Any:
        return Backend.Options(NAME)

    @property
    def supports_splitting(self) -> bool:
        return True

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing. The ranks have been connected since the group was created."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> SordinoBackend:
        """Return the backend of a group of some of the ranks, which meet at `store`.

        Raises:
            ValueError: this rank is not one of them. torch would take None for a backend that cannot be split.
        """
        members, rank = list(ranks), self._do.rank
        if rank not in members:
            raise ValueError(
                f"split_group: rank {rank} is not in the new group {members}. Give every rank a group (split_ranks), "
                "or use new_group"
            )
        try:
            context, store = world_at(store, members.index(rank), len(members), None)
        except SordinoError as error:
            raise torch_error(error) from error
        return SordinoBackend(Place(context, store, owns=True))

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks are here. See `monitored.barrier`; without a timeout, the limit is 30 minutes."""
        limit = opts.timeout if opts.timeout > timedelta(0) else default_pg_timeout
        self._pass_monitored_barrier(limit, wait_all_ranks)
