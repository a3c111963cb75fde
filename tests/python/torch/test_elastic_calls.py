"""`hvd.elastic.run` keeps, from one call of the training function to the next, what it needs and nothing else."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.errors import SordinoError, Unwritable
from sordino.runtime.context import current
from sordino.runtime.recovery import growth
from sordino.torch.elastic import HostsUpdatedInterrupt, ObjectState


@pytest.mark.parametrize("chained", [False, True])
def test_locals_of_a_call_that_failed_are_freed(chained: bool) -> None:
    seen: list[Any] = []

    @hvd.elastic.run
    def train(state: ObjectState) -> bool:
        if seen:
            gc.collect()
            return seen[0]() is None
        batch = torch.ones(3)
        seen.append(weakref.ref(batch))
        if not chained:
            raise SordinoError("a fault")
        try:
            raise ValueError("in the script")
        except ValueError as error:
            raise SordinoError("a fault") from error

    assert sim.run(1, lambda: train(ObjectState(step=0))) == [True]


def test_a_full_disk_ends_the_run() -> None:
    """Only the rank that writes knows of it, and the others wait for that rank."""
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        calls.append(state.step)
        raise Unwritable("the disk is full")

    with pytest.raises(Unwritable):
        sim.run(1, lambda: train(ObjectState(step=0)))
    assert calls == [0]


def test_a_size_that_changes_in_the_synchronization_is_noticed() -> None:
    """The reset callbacks have seen the size of `rejoin`, so the next commit has to call them again."""

    def work() -> None:
        state = ObjectState(step=0)
        state.rejoin(undo=False)
        state._size = 3  # as if a third rank were lost from now on
        state.sync()
        with pytest.raises(HostsUpdatedInterrupt):
            state.commit()

    sim.run(2, work)


@pytest.mark.parametrize("all_leave", [False, True])
def test_a_rank_asks_again_unless_all_want_to_leave(all_leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it could not leave for another reason, such as a newcomer that died, the next commit lets it leave."""
    asked: list[bool] = []

    def admit(_: Any, __: Any, leaves: bool) -> bool:
        asked.append(leaves)
        return all_leave

    monkeypatch.setattr(importlib.import_module("sordino.torch.elastic.run"), "admit", admit)

    @hvd.elastic.run
    def train(state: ObjectState) -> None:
        state.leaves = True
        while state.step < 3:
            state.step += 1
            state.commit()

    sim.run(1, lambda: train(ObjectState(step=0)))
    assert asked == ([True] if all_leave else [True] * 3)


def test_all_want_to_leave() -> None:
    def work() -> tuple[bool, bool]:
        return growth.admit(current(), [], True), growth.admit(current(), [], False)

    assert sim.run(2, work, on_peer_lost="continue") == [(True, False)] * 2
