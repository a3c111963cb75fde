"""Codes of the dtypes for which the core has kernels (csrc/base/dtype.h)."""

from __future__ import annotations

import torch

DTYPE_CODES: dict[torch.dtype, int] = {
    torch.bool: 0,
    torch.uint8: 1,
    torch.int8: 2,
    torch.uint16: 3,
    torch.int16: 4,
    torch.uint32: 5,
    torch.int32: 6,
    torch.uint64: 7,
    torch.int64: 8,
    torch.float16: 9,
    torch.bfloat16: 10,
    torch.float32: 11,
    torch.float64: 12,
}
DTYPES: dict[int, torch.dtype] = {code: dtype for dtype, code in DTYPE_CODES.items()}
