"""Devices: the host, and GPUs, whose memory the core accesses through a `Device`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sordino._core import Device, cuda_device, nccl_hint
from sordino.errors import NotBuilt, UsageError
from sordino.runtime.context import Context, current_or_none

HOST = torch.device("cpu")


def find_nccl() -> None:
    """Tell the core where pip has installed NCCL, in case it is not loaded yet."""
    found = find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        path = Path(folder) / "nccl" / "lib" / "libnccl.so.2"
        if path.is_file():
            nccl_hint(str(path))


@cache
def _gpu(index: int) -> Device:
    find_nccl()
    device = cuda_device(index)
    # Called for each gradient: torch.cuda.current_stream() takes ten times as long.
    device.current_stream = partial(torch._C._cuda_getCurrentRawStream, index)
    device.on_no_room(torch.cuda.empty_cache)  # releases memory that torch has freed but keeps
    return device


def core_device(device: torch.device, context: Context | None = None) -> Device | None:
    """Return the core's device for a device of torch; None for the CPU.

    Args:
        device: torch's device; a CUDA device without an index is the current one.
        context: the context of this rank; None: the current one.

    Raises:
        NotBuilt: this build does not support that kind of device.
    """
    if device.type == "cpu":
        context = context or current_or_none()
        return context.host_device if context is not None else None
    if device.type != "cuda":
        raise NotBuilt(f"tensors on {device} are not supported; move them to the CPU or to a CUDA device")
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


def encoding_device(device: torch.device) -> torch.device:
    """Return the device on which tensors of a device are encoded: the CPU if the core does not support the device."""
    return device if device.type in ("cpu", "cuda") else HOST


def common_device(tensors: Iterable[torch.Tensor], what: str) -> torch.device:
    """Return the device of all tensors; the CPU without tensors. Raises UsageError if they are on several devices."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if len(devices) > 1:
        raise UsageError(f"{what} are on several devices ({', '.join(map(str, devices))}); move them to one device")
    return devices[0] if devices else HOST


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream that this thread computes on; None for the CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


@contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the work of the block on `stream`. The stream current after the block waits for it. None changes nothing."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)


@dataclass(frozen=True)
class _GpuBytes:
    """Contiguous bytes of GPU memory, from which torch can make a tensor."""

    owner: object
    address: int
    bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the interface."""
        place = (self.address, False)
        return {"shape": (self.bytes,), "typestr": "|u1", "data": place, "strides": None, "version": 3}


def gpu_tensor(owner: object, address: int, count: int, device: torch.device) -> torch.Tensor:
    """Return GPU memory of `owner` as a tensor (uint8, 1-d) that keeps `owner` alive, without a copy."""
    return torch.as_tensor(_GpuBytes(owner, address, count), device=device)
