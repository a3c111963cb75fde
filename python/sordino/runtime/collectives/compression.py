"""Compression: casts of tensors to fewer bits before they are sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class Compressor(ABC):
    """Interface: `decompress(*compress(tensor))` has the dtype of `tensor`."""

    @staticmethod
    @abstractmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the state for `decompress`."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the received tensor in its original dtype."""


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors as dtype `narrow`. Values beyond its range become infinite."""

    narrow: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        if not tensor.dtype.is_floating_point:
            return tensor, None
        return tensor.to(cls.narrow), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16."""

    narrow = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16, which has the range of float32 and fewer digits."""

    narrow = torch.bfloat16


class Compression:
    """Values for `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
