"""Version counters of tensors that the core changes in place, unseen by torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version


def _note_changes(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def _found_note_change() -> Callable[[Sequence[torch.Tensor]], None]:
    """Return torch's own function, where it takes several tensors (torch 2.6 and newer)."""
    try:
        torch._C._increment_version(())  # type: ignore[arg-type]
    except TypeError:
        return _note_changes
    return torch._C._increment_version  # type: ignore[return-value]


note_change = _found_note_change()
"""Tells autograd that tensors are changed in place: a graph that has saved one of them refuses to use it."""
