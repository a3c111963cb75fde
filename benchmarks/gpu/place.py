"""Device of a benchmark: a GPU, or the host instead of one, where everything runs but times mean nothing."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from sordino._core import build_info, cuda_kernels, kernels, sim_device
from sordino.errors import NotBuilt
from sordino.runtime.context import current
from sordino.timing import Run

Set = TypeVar("Set")
Call = tuple[int, str, Callable[[Set], object]]
"""Number of lists of elements read or written, name of the required kernel method, and a call on a set of buffers."""

HOST_CACHE = 64 << 10  # bytes; small, so that few buffers are needed


class HostKernels:
    """Host kernels with the interface of the GPU's kernels. Some kernels are missing."""

    def reduce(self, op: int, dtype: int, rows: Any, sources: int, pre: float, post: float, *, stream: int) -> None:
        for at, count in rows:
            kernels.reduce(op, dtype, at[:sources], at[sources:], count, pre, post)

    def axpby(self, dtype: int, rows: Any, a: float, b: float, *, stream: int) -> None:
        for (x, y), count in rows:
            kernels.axpby(dtype, x, y, count, a, b)

    def flatten(self, tensors: Sequence[tuple[int, int]], flat: int, *, stream: int) -> None:
        kernels.flatten(tensors, flat)

    def unflatten(self, flat: int, tensors: Sequence[tuple[int, int]], *, stream: int) -> None:
        kernels.unflatten(flat, tensors)

    def encode(self, codec: Any, values: int, count: int, encoded: int, infinite: int, *, stream: int) -> None:
        codec.encode(values, count, encoded)

    def decode(
        self, codec: Any, encoded: int, count: int, values: int, weight: float, add: bool, *, stream: int
    ) -> None:
        codec.decode(encoded, count, values, weight, add)

    def unchanged(self, items: Any, now: int, before: int, counts: int, *, stream: int) -> None:
        items.unchanged(now, before, counts)


@dataclass(frozen=True)
class Place:
    """A GPU, or the host instead of one.

    Attributes:
        device: device of tensors.
        name: name of the GPU, or a description of the host.
        cache: bytes of the last-level cache.
    """

    device: torch.device
    name: str
    cache: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.on_gpu else 0

    def kernels(self) -> Any:
        """Return the kernels of this device."""
        return cuda_kernels.CudaKernels(self.device.index) if self.on_gpu else HostKernels()

    def sets(self, least: int) -> int:
        """Return the number of sets of buffers for rotation, if each call touches at least `least` bytes of a set.

        Twice the cache's size is touched before a set is used again, so the set has left the cache.
        """
        return 1 + -(-2 * self.cache // least)

    def finish(self) -> None:
        """Wait until the device has finished the work of the current stream."""
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()

    def turn(self, run: Run, count: int) -> tuple[float, float]:
        """Return the seconds per run of `count` runs, by the host's clock and, on a GPU, between CUDA events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self.on_gpu else (None, None)
        self.finish()
        start = time.perf_counter()
        if begin is not None:
            begin.record()
        for _ in range(count):
            run()
        if end is not None:
            end.record()
        self.finish()
        wall = (time.perf_counter() - start) / count
        return wall, float(begin.elapsed_time(end)) * 1e-3 / count if begin is not None and end is not None else wall


def add_option(options: argparse.ArgumentParser) -> None:
    """Add the option --pretend."""
    options.add_argument(
        "--pretend", action="store_true", help="run on the host instead of a GPU, in small; write nothing"
    )


def find(program: str, pretend: bool, local_rank: int = 0) -> Place:
    """Return the place of a rank. NotBuilt if no GPU can run the kernels, unless `pretend`."""
    if pretend:
        torch.set_num_threads(1)
        return Place(torch.device("cpu"), "the host, for a GPU", HOST_CACHE)
    if not build_info()["cuda"]:
        cuda_kernels.CudaKernels(0)  # raises NotBuilt with the fix
    if not torch.cuda.is_available():
        raise NotBuilt(f"the benchmark {program} needs an NVIDIA GPU, and a PyTorch that sees it (`sordino doctor`)")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    properties = torch.cuda.get_device_properties(device)
    return Place(device, properties.name, properties.L2_cache_size)


def enter(place: Place) -> None:
    """On the host, let CPU tensors represent the memory of a simulated GPU in the current world."""
    current().host_device = None if place.on_gpu else sim_device(0)


def in_turn(calls: Sequence[Callable[[], object]]) -> Run:
    """Return a function that makes one of these calls each time, in rotation."""
    number = 0

    def run() -> None:
        nonlocal number
        calls[number]()
        number = (number + 1) % len(calls)

    return run
