"""Encoding of Counters and of NumPy numbers and arrays in checkpoints.

States of schedulers (MultiStepLR) and random generators have such values. In a file each is a dict with the key
"sordino_value", because a file that executes no code when it is read cannot hold foreign types. A NumPy number that is
a key becomes Python's number, which is equal to it as a key.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sordino.errors import UsageError

MARK = "sordino_value"
_KINDS = "biufc"  # kinds of NumPy types: booleans and all numbers


def is_number(value: object) -> bool:
    """Return whether a value is a NumPy number, or an array of numbers."""
    return (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _KINDS


def plain_key(key: Any) -> Any:
    """Return a key with NumPy numbers replaced by Python's; the key itself if it has none."""
    if type(key) is tuple:
        parts = tuple(map(plain_key, key))
        return key if all(one is other for one, other in zip(parts, key)) else parts
    return key.item() if isinstance(key, np.generic) else key


def encoded(value: Any) -> Any:
    """Return the value with Counters and NumPy numbers and arrays replaced by dicts of plain values.

    Raises:
        UsageError: a dict looks like such an encoded value.
    """
    if type(value) is Counter:
        return {MARK: "Counter", "counts": encoded(dict(value))}
    if is_number(value):
        raw = torch.from_numpy(np.frombuffer(value.tobytes(), dtype=np.uint8).copy())
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {MARK: "NumPy", "dtype": value.dtype.str, "shape": shape, "bytes": raw}
    if isinstance(value, dict) and MARK in value:
        raise UsageError(f"a dict in the state has the key {MARK!r}, which checkpoints reserve; rename it")
    return _each(value, encoded)


def decoded(value: Any) -> Any:
    """Return the value with encoded values replaced by the originals.

    Raises:
        ValueError: a dict has the key but is no valid encoded value.
    """
    if not (isinstance(value, dict) and MARK in value):
        return _each(value, decoded)
    kind = value[MARK]
    if kind == "Counter" and value.keys() == {MARK, "counts"}:
        counts = decoded(value["counts"])
        if isinstance(counts, dict):
            return Counter(counts)
    if kind == "NumPy" and value.keys() == {MARK, "dtype", "shape", "bytes"}:
        return _number(value["dtype"], value["shape"], value["bytes"])
    raise ValueError(f"it has a dict with the key {MARK!r} that holds something else")


def _number(code: object, shape: object, raw: object) -> Any:
    whole = isinstance(raw, torch.Tensor) and raw.dtype == torch.uint8 and raw.dim() == 1
    sizes: list[int] = shape if isinstance(shape, list) else []
    fits = (shape is None or shape is sizes) and all(type(size) is int and size >= 0 for size in sizes)
    if not (isinstance(code, str) and code[1:2] in tuple(_KINDS) and isinstance(raw, torch.Tensor) and whole and fits):
        raise ValueError("a NumPy array is damaged")
    try:
        dtype = np.dtype(code)
    except TypeError as error:
        raise ValueError(f"NumPy has no type {code!r}") from error
    if raw.numel() != math.prod(sizes) * dtype.itemsize:
        raise ValueError("the number of bytes of a NumPy array does not match its shape")
    values = np.frombuffer(raw.contiguous().numpy().tobytes(), dtype=dtype).reshape(sizes).copy()
    return values if shape is not None else values[()]


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with plain keys and `change` applied to its values; `value` itself if nothing changes."""
    if isinstance(value, dict):
        items = {plain_key(key): change(item) for key, item in value.items()}
        same = all(new is key and items[new] is item for new, (key, item) in zip(items, value.items()))
        return value if same else type(value)(items)
    if isinstance(value, (list, tuple)):
        parts = [change(item) for item in value]
        same = all(one is other for one, other in zip(parts, value))
        return value if same else type(value)(parts)
    return value
