"""The backend "sordino" of torch.distributed: `init_process_group("sordino")`, then DDP, FSDP2 and others unchanged.

    group.py          the process group that torch calls, for tensors of all devices
    backend.py        the backend that torch calls if a group has another one for other devices
    operations.py     the base of both: the operations by torch's names
    place.py          the world of a group's ranks, and how they meet
    collectives.py    the operations, in terms of this library's own
    submissions.py    submission of operations to the core
    work.py           the object that torch waits for
    untraced.py       mark of functions that torch.compile leaves alone
    shared_memory.py  memory that the ranks of a node share, for the buffers of FSDP2 and DDP
    meeting.py        meeting of the ranks if torch's own variables are not set

`import torch` calls `register` (the entry point in `torch.backends`), so this module imports only torch before a group
is created.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

__all__ = ["register"]

_VERSION: Any = torch.__version__  # can be compared with tuples, although its annotation does not allow it


def register() -> None:
    """Make the backend "sordino", and the `init_method` "sordino://", known to torch.distributed."""
    if dist.is_available() and "sordino" not in dist.Backend.backend_list:
        dist.Backend.register_backend("sordino", _make, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("sordino", _meet)


def _make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a process group, or a backend for one, for `init_process_group` and `new_group`.

    Raises:
        ValueError: the group has several backends, and torch is older than 2.14 or its debug level is DETAIL.
    """
    others = _other_backends(sys._getframe(1))
    if others and not _VERSION >= (2, 14):
        raise ValueError(
            f"sordino cannot be one of several backends of a group ({others}) with PyTorch {_VERSION}, only "
            'with 2.14 or newer. Use backend="sordino", which also serves CUDA tensors, by NCCL'
        )
    if others and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        raise ValueError(
            f"sordino cannot be one of several backends of a group ({others}) with TORCH_DISTRIBUTED_DEBUG=DETAIL, "
            "because PyTorch cannot wrap a backend that is written in Python. Set it to INFO"
        )
    from sordino.distributed.group import make

    return make(store, rank, size, timeout, composed=bool(others))


def _other_backends(caller: FrameType) -> str:
    """Return the backends of the group that torch creates if there are several; "" otherwise.

    torch does not pass them to the function that it calls, but has them in a local variable. A caller without that
    variable is not torch, and creates no group with several backends.
    """
    config = caller.f_locals.get("backend_config")
    names = set() if config is None else set(config.get_device_backend_map().values())
    return str(config) if len(names) > 1 else ""


def _meet(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store at which the ranks of this process's launcher meet, with rank and size."""
    from sordino.distributed.meeting import meet

    yield meet(**options)


register()
