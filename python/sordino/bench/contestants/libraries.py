"""Communication libraries that a rank measures, with one interface. Only the chosen library is imported."""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from sordino._core import kernels
from sordino.bench.contestants.operations import partner
from sordino.runtime.collectives.operation import Sum
from sordino.runtime.dtypes import DTYPE_CODES

Call = Callable[[], Any]
"""Function that makes one blocking call, and returns its result as a tensor."""


class Library(ABC):
    """Library that makes collective calls.

    Attributes:
        rank: number of this rank.
        ranks: number of ranks.
        version: name and version, for the report.
        communicates: whether calls have results to check.
    """

    rank: int
    ranks: int
    version: str
    communicates = True

    def empty(self, count: int) -> torch.Tensor:
        """Return a vector of float32 in the memory that this contestant uses."""
        return torch.empty(count)

    @abstractmethod
    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        """Return a function for repeated calls; None if the library has no such operation.

        `result` is a vector for the result, which is empty for operations in place.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks by the library's own barrier, in which it completes unfinished sends. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Shut the library down. Collective."""


def _in_turn(rank: int, ranks: int, send: Callable[[int], object], receive: Callable[[int], object]) -> Call:
    """Return a function for sendrecv, made of functions that send to a rank and receive from a rank."""
    peer = partner(rank, ranks)
    if peer == rank:
        return _nothing
    first, second = (send, receive) if rank < peer else (receive, send)

    def run() -> None:
        first(peer)
        second(peer)

    return run


def _out(function: Callable[..., Any], result: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the keyword `out` for functions that take a preallocated result. Others return a new tensor."""
    return {"out": result} if "out" in signature(function).parameters else {}


class Ordinary(Library):
    """Blocking calls of `sordino.torch`, or of `horovod.torch`, whose API is the same, with ordinary tensors."""

    def __init__(self, module: str = "sordino") -> None:
        self._hvd: Any = importlib.import_module(f"{module}.torch")
        self._hvd.init()
        self.rank, self.ranks = self._hvd.rank(), self._hvd.size()
        self.version = str(importlib.import_module(module).__version__)

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        hvd, name = self._hvd, f"{operation}.{source.numel()}"
        if operation == "allreduce":
            return lambda: hvd.allreduce_(source, name=name, op=hvd.Sum)
        if operation == "broadcast":
            return lambda: hvd.broadcast_(source, 0, name=name)
        if operation == "barrier":
            return self.barrier
        if operation == "sendrecv":
            if not hasattr(hvd, "send"):  # Horovod
                return None
            run = _in_turn(self.rank, self.ranks, lambda to: hvd.send(source, to), lambda by: hvd.recv(result, by))
            return _returning(run, result)
        function = getattr(hvd, operation)
        options = _out(function, result) | ({"op": hvd.Sum} if operation == "reducescatter" else {})
        return lambda: function(source, name=name, **options)

    def barrier(self) -> None:
        self._hvd.barrier()

    def close(self) -> None:
        self._hvd.shutdown()


class Arena(Ordinary):
    """Blocking calls of Sordino with tensors in memory that all ranks map."""

    def empty(self, count: int) -> torch.Tensor:
        tensor: torch.Tensor = self._hvd.shared_empty(count, dtype=torch.float32)
        return tensor


class Asynchronous(Ordinary):
    """Asynchronous calls of Sordino, each followed immediately by `synchronize`."""

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        hvd, name = self._hvd, f"{operation}.{source.numel()}"
        if operation == "allreduce":
            return lambda: hvd.synchronize(hvd.allreduce_async_(source, name=name, op=hvd.Sum))
        if operation == "broadcast":
            return lambda: hvd.synchronize(hvd.broadcast_async_(source, 0, name=name))
        if operation in ("sendrecv", "barrier"):
            return None
        function = getattr(hvd, f"{operation}_async")
        options = _out(function, result) | ({"op": hvd.Sum} if operation == "reducescatter" else {})
        if operation == "alltoall":  # Its result includes the numbers of rows received.
            return lambda: hvd.synchronize(function(source, name=name, **options))[0]
        return lambda: hvd.synchronize(function(source, name=name, **options))


class Mpi(Library):
    """MPI through mpi4py's calls on buffers. They are given MPI types, because detecting types takes time."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world = MPI, MPI.COMM_WORLD
        self.rank, self.ranks = self._world.rank, self._world.size
        first = MPI.Get_library_version().splitlines()[0].split(",")[0].strip(" \0")
        self.version = " ".join(first.split())

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        world, in_place, add = self._world, self._mpi.IN_PLACE, self._mpi.SUM
        sent, received = [source.numpy(), self._mpi.FLOAT], [result.numpy(), self._mpi.FLOAT]
        calls: dict[str, Callable[[], None]] = {
            "allreduce": lambda: world.Allreduce(in_place, sent, add),
            "allgather": lambda: world.Allgather(sent, received),
            "reducescatter": lambda: world.Reduce_scatter_block(sent, received, add),
            "alltoall": lambda: world.Alltoall(sent, received),
            "broadcast": lambda: world.Bcast(sent, 0),
            "sendrecv": _in_turn(
                self.rank, self.ranks, lambda to: world.Send(sent, to), lambda by: world.Recv(received, by)
            ),
            "barrier": world.Barrier,
        }
        return _returning(calls[operation], result if result.numel() else source)

    def barrier(self) -> None:
        self._world.Barrier()

    def close(self) -> None:
        self._mpi.Finalize()


class Distributed(Library):
    """torch.distributed over Gloo, or over another backend.

    Args:
        backend: name of the backend.
        options: further arguments of `init_process_group`.
    """

    def __init__(self, backend: str = "gloo", **options: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._distributed: Any = torch.distributed
        self._distributed.init_process_group(backend, **options)
        self.rank, self.ranks = self._distributed.get_rank(), self._distributed.get_world_size()
        self.version = f"of torch {torch.__version__}"

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        distributed = self._distributed
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: distributed.all_reduce(source),
            "allgather": lambda: distributed.all_gather_into_tensor(result, source),
            "reducescatter": lambda: distributed.reduce_scatter_tensor(result, source),
            "alltoall": lambda: distributed.all_to_all_single(result, source),
            "broadcast": lambda: distributed.broadcast(source, 0),
            "sendrecv": _in_turn(
                self.rank,
                self.ranks,
                lambda to: distributed.send(source, to),
                lambda by: distributed.recv(result, by),
            ),
            "barrier": distributed.barrier,
        }
        return _returning(calls[operation], result if result.numel() else source)

    def barrier(self) -> None:
        self._distributed.barrier()

    def close(self) -> None:
        self._distributed.destroy_process_group()


def _returning(call: Callable[[], object], result: torch.Tensor) -> Call:
    def run() -> torch.Tensor:
        call()
        return result

    return run


class Alone(Ordinary):
    """The calls of `Ordinary`, but each rank makes them in a process set of its own: the time of a call by itself."""

    communicates = False

    def __init__(self) -> None:
        super().__init__()
        self._set = [self._hvd.add_process_set([rank]) for rank in range(self.ranks)][self.rank]

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        hvd, name, own = self._hvd, f"{operation}.{source.numel()}", self._set
        if operation == "allreduce":
            return lambda: hvd.allreduce_(source, name=name, op=hvd.Sum, process_set=own)
        if operation == "broadcast":
            return lambda: hvd.broadcast_(source, self.rank, name=name, process_set=own)
        if operation == "barrier":
            return lambda: hvd.barrier(process_set=own)
        if operation == "sendrecv":
            return None
        function, target = getattr(hvd, operation), torch.empty_like(source)
        options = {"op": hvd.Sum} if operation == "reducescatter" else {}
        return lambda: function(source, out=target, name=name, process_set=own, **options)


class Floor(Ordinary):
    """Memory traffic that no implementation can avoid, in private memory and without communication.

    allreduce: a rank reads and writes its share of the tensors of all ranks. reducescatter: it reads its share of all
    tensors, and writes the sum. allgather, alltoall, broadcast, sendrecv: it copies its result, except for the
    broadcast's root.
    """

    communicates = False

    def prepare(self, operation: str, source: torch.Tensor, result: torch.Tensor) -> Call | None:
        if operation == "barrier":
            return None
        if operation == "allreduce":
            return averaging_alone(source.numel(), self.ranks)
        if operation == "reducescatter":
            arrays = torch.full((self.ranks, result.numel()), 1.5)
            return _reducing_alone(arrays, [result.data_ptr()])
        copied = torch.full_like(result if result.numel() else source, 1.5)
        target = torch.empty_like(copied)
        return _nothing if operation == "broadcast" and self.rank == 0 else lambda: target.copy_(copied)


def averaging_alone(count: int, ranks: int) -> Call:
    """Return a function that reads and writes a rank's share of `ranks` float32 arrays, like an in-place average."""
    arrays = torch.full((ranks, -(-count // ranks)), 1.5)
    return _reducing_alone(arrays, [row.data_ptr() for row in arrays])


def _reducing_alone(arrays: torch.Tensor, targets: list[int]) -> Call:
    places, code = [row.data_ptr() for row in arrays], DTYPE_CODES[torch.float32]

    def run(keep: torch.Tensor = arrays) -> None:
        kernels.reduce(Sum, code, places, targets, keep.shape[1], 1.0, 1 / keep.shape[0])

    return run


def _nothing() -> None:
    """Do nothing: the root of a broadcast has its data, and a rank without a partner sends nothing."""


LIBRARIES: dict[str, Callable[[], Library]] = {
    "ordinary": Ordinary,
    "arena": Arena,
    "asynchronous": Asynchronous,
    "mpi": Mpi,
    "distributed": lambda: Distributed("sordino", init_method="sordino://"),
    "gloo": Distributed,
    "horovod": lambda: Ordinary("horovod"),
    "alone": Alone,
    "floor": Floor,
}
