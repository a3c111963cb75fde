"""Changes that a loss has interrupted are undone; changes that completed, or failed for another reason, are not."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import PeerLost
from sordino.runtime.exchange.rollback import Rollback


def undo_where_ranks_outlast(lasts: bool) -> Rollback:
    return Rollback(SimpleNamespace(survives_losses=lasts))  # type: ignore[arg-type]


def test_a_loss_is_undone_in_memory_of_its_own() -> None:
    undo = undo_where_ranks_outlast(True)
    one, other = torch.arange(3.0), torch.ones(2, dtype=torch.float64)
    arena, view = one, one[1:]
    for turn in range(2):
        with pytest.raises(PeerLost), undo.around([one, other]):
            one.mul_(5)
            other.zero_()
            raise PeerLost("gone")
        undo.go_back([one, view])
        assert one.tolist() == [0, 1, 2] and view.tolist() == [1, 2] and other.tolist() == [1, 1], turn
        assert view.data_ptr() != one[1:].data_ptr()
    with undo.around([arena]):
        arena.add_(1)
    undo.go_back([arena])
    assert arena.tolist() == [1, 2, 3]


class LateWrites(TorchDispatchMode):
    """Mode that writes NaN to an arena after each copy to it, as a rank that was taken for lost may still do."""

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()
        self._place, self._bytes = arena.data_ptr(), arena.nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() == self._place:
            ctypes.memset(self._place, 255, self._bytes)
        return result


def test_a_late_write_of_another_rank_does_no_harm() -> None:
    undo = undo_where_ranks_outlast(True)
    arena = torch.arange(100.0)
    matrix, rest = arena[:20].view(4, 5).t(), arena[20:].detach()
    with pytest.raises(PeerLost), undo.around([arena]):
        arena.zero_()
        raise PeerLost("gone")
    with LateWrites(arena):
        undo.go_back([rest, matrix])
    assert bool(arena.isnan().all())
    assert rest.tolist() == list(range(20, 100))
    assert matrix.t().flatten().tolist() == list(range(20))


def test_what_ends_is_not_undone() -> None:
    undo = undo_where_ranks_outlast(True)
    value = torch.zeros(2)
    with pytest.raises(ValueError), undo.around([value]):
        value.add_(1)
        raise ValueError
    undo.go_back([value])
    assert value.tolist() == [1, 1]


def test_where_a_loss_ends_the_job_nothing_is_kept() -> None:
    undo = undo_where_ranks_outlast(False)
    value = torch.zeros(2)
    with pytest.raises(PeerLost), undo.around([value]):
        value.add_(1)
        raise PeerLost("gone")
    undo.go_back([value])
    assert value.tolist() == [1, 1]
