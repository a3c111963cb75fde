"""Table of the checks, and the code that runs one of them on this rank."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino.algorithms import CaPS, Layered
from sordino.runtime.context import current_or_none

MODULES = (
    "adasum",
    "agreement",
    "allreduce",
    "autograd",
    "claims",
    "compiled",
    "compressed",
    "compressed_gossip",
    "diloco",
    "diloco_overlap",
    "double_buffering",
    "drift",
    "elementwise",
    "error_feedback",
    "final_gradients",
    "frozen",
    "gathering",
    "gossip",
    "gradient_places",
    "hooks",
    "joining",
    "layered",
    "life",
    "local_sgd",
    "local_sgd_encoded",
    "local_sgd_states",
    "low_rank",
    "mismatches",
    "moving",
    "noloco",
    "objects",
    "optimizer_copies",
    "optimizer_gradients",
    "optimizer_misuse",
    "optimizer_options",
    "optimizer_torch",
    "optimizers",
    "point_to_point",
    "postponed",
    "process_sets",
    "programs",
    "push_sum",
    "repeated",
    "repeats",
    "shards",
    "shared",
    "caps",
    "caps_life",
    "sparse",
    "storage",
    "sync_batch_norm",
    "transforms",
    "plan",
    "scheduled_pull",
)

# Modules that are worth running again where only the transport of bytes differs.
_MOVING = {
    "adasum",
    "agreement",
    "allreduce",
    "compressed_gossip",
    "gathering",
    "gossip",
    "gradient_places",
    "joining",
    "layered",
    "life",
    "local_sgd",
    "local_sgd_states",
    "moving",
    "optimizer_gradients",
    "point_to_point",
    "process_sets",
    "push_sum",
    "repeated",
    "repeats",
    "shards",
    "shared",
    "caps",
    "caps_life",
    "plan",
    "scheduled_pull",
}


@dataclass
class Seat:
    """Place of this rank in a check."""

    rank: int
    size: int
    transport: str  # "sim" (threads) or "processes"
    folder: str  # the same on all ranks, empty at the start
    log: list[tuple[str, str]] = field(default_factory=list)

    def same(self, label: str, *values: Any) -> None:
        """Note that these values must be equal on all ranks, tensors bit for bit."""
        for value in values:
            self.log.append((label, digest(value)))

    @property
    def last(self) -> int:
        return self.size - 1

    # Filters of warnings are the process's. Ranks that are its threads would restore each other's, and some would stay.

    def warned(
        self, words: str, kind: type[Warning] = RuntimeWarning, when: bool = True
    ) -> AbstractContextManager[Any]:
        """Return a context that expects a warning, if `when` holds and ranks are processes."""
        return pytest.warns(kind, match=words) if when and self.transport == "processes" else nullcontext()

    @contextmanager
    def no_warnings(self) -> Iterator[None]:
        """Turn warnings in this context into errors, if ranks are processes."""
        if self.transport != "processes":
            yield
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    def meet(self, name: str, ranks: Iterable[int] | None = None) -> None:
        """Wait for the other ranks (or some) without the library, by files."""
        (Path(self.folder) / f"{name}.{self.rank}").touch()
        limit = time.monotonic() + 100
        for rank in range(self.size) if ranks is None else ranks:
            while not (Path(self.folder) / f"{name}.{rank}").exists():
                assert time.monotonic() < limit, f"rank {rank} does not come to {name}"
                time.sleep(0.001)


def digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else torch.empty(0)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"


@dataclass(frozen=True)
class Check:
    name: str
    function: Callable[..., None]
    arguments: dict[str, Any]
    least: int  # ranks
    on: tuple[str, ...]
    helpers: str = ""  # communicators of "one" group or of "pairs", "servers", or ""
    worlds: tuple[str, ...] = ()  # for which it is meaningful; empty for all
    quick: tuple[str, ...] = ()  # the most meaningful worlds: `make test` runs it in one of these

    @property
    def moves_bytes(self) -> bool:
        """Whether the check depends on the transport of bytes."""
        return self.name.partition(".")[0] in _MOVING

    def algorithm(self, size: int) -> Layered | CaPS | None:
        """Return the helpers' algorithm for `init()` in a job of this many ranks."""
        if self.helpers == "servers":
            return skipping_on_servers(max(1, size // 2 - 1))
        members = {"one": size - 1, "pairs": 1}.get(self.helpers)
        return None if members is None else Layered(members, "rank")

    def serves(self, transport: str, size: int) -> bool:
        fits = self.helpers == "" or (size % 2 == 0 and size > 2 if self.helpers == "pairs" else size > 2)
        return transport in self.on and size >= self.least and fits

    def run(self, transport: str, folder: str) -> list[tuple[str, str]]:
        """Run the check on this rank of the current world; return the values that must be equal on all ranks."""
        seat = Seat(hvd.rank(), hvd.size(), transport, folder)
        self.function(seat, **self.arguments)
        wait_for_leftovers()
        return seat.log


def skipping_on_servers(servers: int, **settings: Any) -> CaPS:
    """Return the algorithm with servers that are ranks of their own."""
    return CaPS(exchange="parameter-server", servers=servers, dedicated_servers=True, **settings)


def wait_for_leftovers() -> None:
    """Wait until operations that no caller waited for have also ended."""
    context = current_or_none()
    limit = time.monotonic() + 100
    while context is not None and context.world.names_in_flight():
        assert time.monotonic() < limit, f"still under way at the end: {context.world.names_in_flight()}"
        time.sleep(0.0005)


_CHECKS: dict[str, Check] = {}


def check(
    least: int = 1,
    on: tuple[str, ...] = ("sim", "processes"),
    helpers: tuple[str, ...] = ("",),
    worlds: tuple[str, ...] = (),
    quick: tuple[str, ...] = (),
    **parameters: Iterable[Any],
) -> Callable[..., Any]:
    """Register a check for worlds of `least` ranks or more, once for every combination of parameter values and of
    `Check.helpers` (ranks without a seat). `worlds` and `quick` are fields of `Check`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        for kind, *values in itertools.product(helpers, *parameters.values()):
            labels = [str(value).replace("torch.", "") for value in values]
            label = "-".join([f"helpers {kind}"] * (kind != "") + labels)
            home = function.__module__.rpartition(".")[2]
            name = f"{home}.{function.__name__}" + (f"[{label}]" if label else "")
            assert name not in _CHECKS, name
            _CHECKS[name] = Check(name, function, dict(zip(parameters, values)), least, on, kind, worlds, quick)
        return function

    return register


def all_checks() -> dict[str, Check]:
    for module in MODULES:
        importlib.import_module(f"checks.{module}")
    return _CHECKS


def compare(logs: list[list[tuple[str, str]]]) -> None:
    """Assert that values with the same label are the same on all ranks."""
    for rank, log in enumerate(logs):
        assert len(log) == len(logs[0]), f"rank {rank} and rank 0 logged different things: {log} and {logs[0]}"
        for (label, here), (other_label, there) in zip(logs[0], log):
            assert label == other_label, f"rank 0 logged {label}, rank {rank} {other_label}"
            assert here == there, f"{label} differs: rank 0 has {here}, rank {rank} has {there}"
