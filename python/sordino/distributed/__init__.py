"""The backend "sordino" of torch.distributed: `init_process_group("sordino")`, then DDP, FSDP2 and others unchanged.

    group.py        the process group that torch calls
    meeting.py      how its ranks meet where torch's own variables are not set
    collectives.py  the operations, in terms of this library's own
    work.py         what torch waits for

`import torch` calls `register` (the entry point in `torch.backends`), so this module imports nothing else before a
group is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

__all__ = ["register"]


def register() -> None:
    """Make the backend "sordino", and the `init_method` "sordino://", known to torch.distributed."""
    if dist.is_available() and "sordino" not in dist.Backend.backend_list:
        dist.Backend.register_backend("sordino", _make, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("sordino", _meet)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group, for `init_process_group` and `new_group`."""
    from sordino.distributed.group import make

    return make(store, rank, size, timeout)


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store at which the ranks of this process's launcher meet, with rank and size."""
    from sordino.distributed.meeting import meet

    yield meet(**options)


register()
