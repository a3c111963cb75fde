"""Calls of the codecs' kernels, with the codecs' default settings, on normally distributed values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu.place import Place, in_turn
from sordino._core import kernels
from sordino.timing import Run

CODECS = {
    "int8": kernels.Codec("int8", 128),
    "int4": kernels.Codec("int4", 128),
    "two_bit": kernels.Codec("two_bit", 128),
    "sign": kernels.Codec("sign", 128),
    "top": kernels.Codec("top", 4096, 64),
}
LIMITS = {name: 0.5 for name in CODECS if name != "top"}
"""Least bandwidth over that of a copy, for the codecs that have a target."""


def codec_of(kernel: str) -> str | None:
    """Return the codec in the name of a row, such as "encode int8"; None: the row is of another kernel."""
    kind, _, name = kernel.partition(" ")
    return name if kind in ("encode", "decode") and name in CODECS else None


class _Buffers:
    """Random values, and buffers for their encodings and for the decoded values."""

    def __init__(self, place: Place, count: int, codec: Any) -> None:
        self.values = torch.randn(count, device=place.device)
        self.total = torch.empty_like(self.values)
        self.encoded = torch.empty(codec.bytes(count), dtype=torch.uint8, device=place.device)
        self.infinite = torch.zeros(1, dtype=torch.int32, device=place.device)


def codec_calls(place: Place, size: int, wanted: Callable[[str], bool]) -> list[tuple[str, str, int, Run]]:
    """Return tasks on `size` bytes of values: name, dtype, bytes read and written, and a function that runs it."""
    on, stream, count = place.kernels(), place.stream, size // torch.float32.itemsize
    rows: list[tuple[str, str, int, Run]] = []
    for name, codec in CODECS.items():
        if not (wanted(f"encode {name}") or wanted(f"decode {name}")):
            continue
        sets = [_Buffers(place, count, codec) for _ in range(place.sets(size))]

        def encode(of: _Buffers, codec: Any = codec) -> None:
            places = (of.values.data_ptr(), count, of.encoded.data_ptr(), of.infinite.data_ptr())
            on.encode(codec, *places, stream=stream)

        def decode(of: _Buffers, codec: Any = codec) -> None:
            places = (of.encoded.data_ptr(), count, of.total.data_ptr())
            on.decode(codec, *places, 1.0, False, stream=stream)

        for of in sets:
            encode(of)
        moved = size + codec.bytes(count)
        rows.append((f"encode {name}", "float32", moved, in_turn([partial(encode, of) for of in sets])))
        rows.append((f"decode {name}", "float32", moved, in_turn([partial(decode, of) for of in sets])))
    return rows
