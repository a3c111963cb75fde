"""Version counters of tensors: torch does not notice the core's changes in place, so they are counted here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import increment_version


def _note_changes(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


def _found_note_change() -> Callable[[Sequence[torch.Tensor]], None]:
    """Return torch's own function if it takes several tensors (torch 2.6 and later), else a replacement."""
    try:
        torch._C._increment_version(())  # type: ignore[arg-type]
    except TypeError:
        return _note_changes
    return torch._C._increment_version  # type: ignore[return-value]


note_change = _found_note_change()
"""Tells autograd that tensors are changed in place, so that a graph that has saved one of them raises an error."""
