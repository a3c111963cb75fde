"""Default group of torch.distributed for the ranks of any launcher.

Frameworks find ranks in the default group of torch.distributed and in torchrun's environment variables. `sordino run`
and mpirun give them neither. So the ranks join the world first, meet at a store of rank 0, and make the group "sordino"
there. Then they set the variables.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed

import sordino.torch as hvd
from sordino import _core
from sordino.rendezvous.environment import RENDEZVOUS

dist: Any = torch.distributed  # its annotations lack much of what a backend uses

_ONE_MACHINE = "127.0.0.1"


def is_unknown_to_frameworks() -> bool:
    """Return whether `sordino run` or MPI's launcher has started this rank, which frameworks do not detect."""
    size, variable = _core.launcher()
    return bool(os.environ.get(RENDEZVOUS)) or (size > 0 and not variable.startswith("SLURM_"))


def join() -> None:
    """Join the world, create the default group "sordino", and set torchrun's variables. Collective.

    An existing default group, of any backend, is kept, and its ranks become the ranks of the world. Without other
    ranks, and in a worker of a DataLoader, there is no group, and no variable is set. A second call does nothing.

    Raises:
        UsageError, ConfigurationMismatch, NotBuilt, Timeout, TransportError: as `sordino.torch.init`.
    """
    hvd.init()
    if not hvd.is_initialized() or hvd.size() == 1:
        return
    if not dist.is_initialized():
        dist.init_process_group("sordino", store=_store(), rank=hvd.rank(), world_size=hvd.size())
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(hvd.rank()), str(hvd.size())
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(hvd.local_rank()), str(hvd.local_size())


def _store() -> Any:
    """Return a store that rank 0 serves to all ranks. MASTER_ADDR and MASTER_PORT become its address, unless set."""
    limit = timedelta(seconds=_core.deadlines()[0])
    store, address = None, None
    if hvd.rank() == 0:
        host = _ONE_MACHINE if hvd.local_size() == hvd.size() else socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        address = host, store.port
    host, port = hvd.broadcast_object(address, root_rank=0, name="sordino.integrations.store")
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    return store
