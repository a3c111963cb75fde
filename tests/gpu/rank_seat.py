"""A rank's place in the checks of GPU operations, and the table of those checks.

They are written for a GPU. On a simulated device (`--pretend`) the CPU's tensors stand for its memory, so that the same
lines run where there is no GPU.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from checks.registry import digest

from sordino._core import Device, sim_device
from sordino.runtime.context import Context, current
from sordino.runtime.exchange.flat_buffer import FlatBuffer, Mirror

MODULES = (
    "rank_operations",
    "rank_moving",
    "rank_streams",
    "rank_training",
    "rank_algorithms",
    "rank_compiled",
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
"""What makes operations go a certain way: the environment of a world. The first is all ways, in their order."""


class LeftOut(Exception):
    """What a check lacks here."""


@dataclass
class Seat:
    """This rank's place.

    Attributes:
        device: of the tensors.
        gpu: what the CPU's tensors stand for, or None on a real GPU.
        apart: whether no two ranks share a GPU.
        route: SORDINO_GPU_ROUTE.
        one_node: whether ranks count as being on one node.
        log: what must be equal on all ranks.
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
        """A copy on the device."""
        return tensor.to(self.device, copy=True)

    def same(self, label: str, *values: object) -> None:
        """Says that these are equal on all ranks, tensors bit for bit."""
        for value in values:
            self.log.append((label, digest(value.detach().cpu() if isinstance(value, torch.Tensor) else value)))

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Within it the device is the host: for twins that are computed there."""
        device, self.device, current().host_device = self.device, HOST, None
        try:
            yield
        finally:
            self.device, current().host_device = device, self.gpu

    def twins(self, run: Callable[[], Iterable[torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of what `run` gives on the device and on the host, both on the host."""
        mine = [tensor.detach().cpu().clone() for tensor in run()]
        with self.on_host():
            return list(zip(mine, [tensor.detach() for tensor in run()], strict=True))

    # ---- ways ----------------------------------------------------------------------------------------------------

    @property
    def reduces(self) -> set[str]:
        """The ways that an all-reduce or an exchange of floats may go."""
        if self.size == 1:
            return {"ALONE"}
        if self.route == "host":
            return {"STAGED"}
        if self.route == "nccl" or (self.apart and self.gpu is None and self.route != "ipc"):
            return {"NCCL"}
        return {"IPC"} if self.one_node else {"MPI", "STAGED"}  # MPI may not take device memory

    @property
    def moves(self) -> set[str]:
        """The ways that other operations may go."""
        return {"STAGED"} if self.reduces == {"IPC"} else self.reduces

    @contextmanager
    def goes(self, ways: set[str], alone: bool = True) -> Iterator[None]:
        """Operations within go one of these ways; if not `alone`, others may go other ways."""
        before = Counter(current().world.gpu_operations)
        yield
        found = Counter(current().world.gpu_operations)
        found.subtract(before)
        taken = {way for way, count in found.items() if count > 0}
        assert taken & ways, f"went {taken or 'no way'}, should have gone {ways}"
        assert not alone or taken <= ways, f"went {taken}, should have gone {ways}"


@dataclass(frozen=True)
class Check:
    """One of them. `cuda`: it needs a real GPU."""

    name: str
    function: Callable[..., None]
    arguments: tuple[object, ...]
    least: int
    cuda: bool


_CHECKS: dict[str, Check] = {}


def check(least: int = 1, cuda: bool = False, each: Iterable[object] = ()) -> Callable[..., Callable[..., None]]:
    """Registers a check for `least` ranks or more, once for each value if there are any."""

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


def pretended(number: int | None) -> Device | None:
    """A simulated GPU. What on a real one is copied to the host is a copy from then on, too."""
    if number is None:
        return None

    def mirror(self: Mirror, context: Context, arena: FlatBuffer) -> None:
        gpu, context.host_device = context.host_device, None
        self._arena, self._host = arena, FlatBuffer(context, arena.layout)
        context.host_device = gpu

    Mirror.__init__ = mirror  # type: ignore[method-assign]
    return sim_device(number)
