"""A rank's place in the checks of GPU operations, and the table of those checks.

The checks are written for a GPU. On a simulated device (`--pretend`) the CPU's tensors stand for its memory, so the
same code runs without a GPU.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from checks.registry import digest

from sordino._core import Device, cuda_device, sim_device
from sordino.runtime.context import Context, current
from sordino.runtime.exchange.flat_buffer import FlatBuffer, Mirror

MODULES = (
    "rank_operations",
    "rank_moving",
    "rank_streams",
    "rank_training",
    "rank_algorithms",
    "rank_compressed",
    "rank_compiled",
    "rank_arrays",
    "rank_graphs",
)
HOST = torch.device("cpu")
WAYS = {
    "": {"SORDINO_GPU_ROUTE": "", "SORDINO_RANKS_PER_NODE": "0"},
    "host": {"SORDINO_GPU_ROUTE": "host"},
    "ipc": {"SORDINO_GPU_ROUTE": "ipc"},
    "nccl": {"SORDINO_GPU_ROUTE": "nccl"},
    "messages": {"SORDINO_RANKS_PER_NODE": "1"},
}
"""Environments that make operations use a certain route. The first one allows all routes, in their order."""


class LeftOut(Exception):
    """Raised if something that a check needs is missing here."""


@dataclass
class Seat:
    """The rank's place.

    Attributes:
        device: device of the tensors.
        gpu: the GPU that the CPU's tensors stand for, or None on a real GPU.
        apart: whether no two ranks share a GPU.
        route: SORDINO_GPU_ROUTE.
        one_node: whether all ranks count as one node.
        log: values that must be equal on all ranks.
    """

    rank: int
    size: int
    folder: str
    device: torch.device
    gpu: Device | None
    apart: bool = False
    route: str = ""
    one_node: bool = True
    log: list[tuple[str, str]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.size - 1

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device."""
        return tensor.to(self.device, copy=True)

    def same(self, label: str, *values: object) -> None:
        """Note that these values must be equal on all ranks, tensors bit for bit."""
        for value in values:
            self.log.append((label, digest(value.detach().cpu() if isinstance(value, torch.Tensor) else value)))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Context in which the device is the host, for twins that are computed there."""
        device, self.device, current().host_device = self.device, HOST, None
        try:
            yield
        finally:
            self.device, current().host_device = device, self.gpu

    def twins(self, run: Callable[[], Iterable[torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of the results of `run` on the device and on the host, all on the host."""
        mine = [tensor.detach().cpu().clone() for tensor in run()]
        with self.on_host():
            return list(zip(mine, [tensor.detach() for tensor in run()], strict=True))

    # ---- routes --------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> set[str]:
        """The routes that an all-reduce or an exchange of floats may use."""
        if self.size == 1:
            return {"ALONE"}
        if self.route == "host":
            return {"STAGED"}
        if self.route == "nccl" or (self.apart and self.gpu is None and self.route != "ipc"):
            return {"NCCL"}
        return {"IPC"} if self.one_node else {"MPI", "STAGED"}  # MPI may not take device memory

    @property
    def moves(self) -> set[str]:
        """The routes that other operations may use."""
        return {"STAGED"} if self.reduces == {"IPC"} else self.reduces

    @contextmanager
    def goes(self, ways: set[str], alone: bool = True) -> Iterator[None]:
        """Assert that operations in the context use one of these routes; without `alone`, some may use others."""
        before = Counter(current().world.gpu_operations)
        yield
        found = Counter(current().world.gpu_operations)
        found.subtract(before)
        taken = {way for way, count in found.items() if count > 0}
        assert taken & ways, f"went {taken or 'no way'}, should have gone {ways}"
        assert not alone or taken <= ways, f"went {taken}, should have gone {ways}"


@dataclass(frozen=True)
class Check:
    """A check. `cuda`: it needs a real GPU."""

    name: str
    function: Callable[..., None]
    arguments: tuple[object, ...]
    least: int
    cuda: bool


_CHECKS: dict[str, Check] = {}


def check(least: int = 1, cuda: bool = False, each: Iterable[object] = ()) -> Callable[..., Callable[..., None]]:
    """Register a check for `least` ranks or more, once for each value if there are values."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        home = function.__module__.removeprefix("rank_")
        values = list(each)
        for arguments in [(value,) for value in values] if values else [()]:
            label = "".join(f"[{value}]".replace("torch.", "") for value in arguments)
            name = f"{home}.{function.__name__}{label}"
            assert name not in _CHECKS, name
            _CHECKS[name] = Check(name, function, arguments, least, cuda)
        return function

    return register


def all_checks() -> dict[str, Check]:
    for module in MODULES:
        importlib.import_module(module)
    return _CHECKS


def pretended(number: int | None, cuda: bool = False) -> Device | None:
    """Return a simulated GPU, or one of the stand-in for CUDA. From now on copies that a real one makes to the host are
    copies here, too."""
    if number is None:
        return None

    def mirror(self: Mirror, context: Context, arena: FlatBuffer) -> None:
        gpu, context.host_device = context.host_device, None
        self._arena, self._host = arena, FlatBuffer(context, arena.layout)
        context.host_device = gpu

    Mirror.__init__ = mirror  # type: ignore[method-assign]
    return cuda_device(number) if cuda else sim_device(number)
