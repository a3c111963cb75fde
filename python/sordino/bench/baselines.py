"""Libraries that Sordino is compared with, as far as they are installed. None of them is required."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from sordino._core import build_info, launcher
from sordino.errors import UsageError
from sordino.report.machines import without_paths
from sordino.timing import Participants

KNOWN = ("gloo", "horovod")


@dataclass
class Baselines:
    """Baselines that were found.

    Attributes:
        gloo: torch.distributed with a default group over Gloo, or None.
        horovod: the module horovod.torch, or None; initialized only within `horovod_turn`.
        notes: for each requested baseline its version, or the reason why it was not found.
    """

    gloo: Any = None
    horovod: Any = None
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def found(self) -> list[str]:
        return [name for name in KNOWN if getattr(self, name) is not None]

    @contextmanager
    def horovod_turn(self) -> Iterator[None]:
        """Initialize Horovod within the block only. Collective.

        Its background thread wakes every millisecond and uses MPI. While it runs, all other work in the process is
        slower: MPI_Allreduce of a few MiB takes several times as long. So it must not run in the turns of other
        contestants.
        """
        self.horovod.init()
        try:
            yield
        finally:
            self.horovod.shutdown()

    def close(self) -> None:
        """Shut down the baselines that `open_all` has started. Collective."""
        if self.gloo is not None:
            self.gloo.destroy_process_group()


def parse_names(text: str) -> list[str]:
    """Return the baselines of a comma-separated list; "none" or "" is an empty list. UsageError for unknown names."""
    names = [name.strip().lower() for name in text.split(",") if name.strip() not in ("", "none")]
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise UsageError(f"unknown baseline {', '.join(unknown)}; use some of {', '.join(KNOWN)}")
    return [name for name in KNOWN if name in names]


def start() -> tuple[Participants, str | None]:
    """Initialize MPI (through mpi4py, if it is installed) and Sordino. Collective.

    mpi4py is initialized first and so finalizes MPI at exit. Then Horovod can be shut down before or after Sordino.

    Returns:
        The participants of all ranks, and the MPI library's name and version.
    """
    import sordino.torch as hvd

    library = None
    mpi = None
    if launcher()[0] > 0:
        mpi, _ = _import("mpi4py.MPI")
    hvd.init()
    everywhere = hvd.allreduce(torch.tensor(int(mpi is not None)), op=hvd.Min, name="bench.mpi4py").item()
    communicator = None
    if mpi is not None and everywhere:
        library = _version(mpi)
        communicator = mpi.COMM_WORLD.Dup()
    elif hvd.mpi_enabled():
        built_with = build_info()["mpi"]
        library = built_with["library"] if built_with else None
    return Participants(hvd.rank(), hvd.size(), communicator, hvd.local_size() == hvd.size()), library


def _version(mpi: Any) -> str:
    return str(mpi.Get_library_version().split(",")[0].strip(" \0\n"))


def open_all(names: Sequence[str], participants: Participants) -> Baselines:
    """Load and initialize the baselines that every rank has. Collective. A missing baseline is no error."""
    found = Baselines()
    openers: dict[str, Callable[[Participants], tuple[Any, str]]] = {
        "gloo": _open_gloo,
        "horovod": _open_horovod,
    }
    for name in names:
        module, note = (None, "needs two ranks") if participants.size == 1 else openers[name](participants)
        setattr(found, name, module)
        found.notes[name] = without_paths(note)
    return found


def _import(name: str) -> tuple[Any, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:
        # A baseline may fail to load in any way (a missing library, a different MPI). All mean "not installed".
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _on_all(participants: Participants, available: bool) -> bool:
    return bool(participants.maximum(np.array([0.0 if available else 1.0]))[0] == 0)


def _open_gloo(participants: Participants) -> tuple[Any, str]:
    import sordino.torch as hvd

    distributed: Any = torch.distributed
    if not _on_all(participants, distributed.is_available() and distributed.is_gloo_available()):
        return None, "not found (torch is built without it)"
    if participants.one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=60)
    address = store = None
    if participants.rank == 0:
        host = "127.0.0.1" if participants.one_node else socket.gethostname()
        store = distributed.TCPStore(host, 0, participants.size, True, timeout=limit, wait_for_workers=False)
        address = (host, store.port)
    host, port = hvd.broadcast_object(address, root_rank=0, name="bench.gloo")
    if store is None:
        store = distributed.TCPStore(host, port, participants.size, False, timeout=limit)
    distributed.init_process_group("gloo", store=store, rank=participants.rank, world_size=participants.size)
    return distributed, f"of torch {torch.__version__}"


def _open_horovod(participants: Participants) -> tuple[Any, str]:
    module, problem = _import("horovod.torch")
    if not _on_all(participants, module is not None):
        return None, f"not found ({problem or 'other ranks lack it'})"
    starts = False
    try:
        module.init()
        starts = module.size() == participants.size
        module.shutdown()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if not _on_all(participants, starts):
        return None, f"does not start ({problem or 'other ranks failed'})"
    return module, str(importlib.import_module("horovod").__version__)
