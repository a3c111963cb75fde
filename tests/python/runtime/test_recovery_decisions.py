"""Repeats after a loss, the limit of recoveries without a loss, and memory that is kept for repeats. The answers of
other ranks are invented."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sordino.torch as hvd
from sordino import sim
from sordino.errors import PeerLost
from sordino.runtime.loss_state import Lockstep, LossState
from sordino.runtime.names import Names
from sordino.runtime.recovery import losses

OPERATIONS = "all.operations"


class World:
    """Context of rank 0 of three ranks, in which reporting a received part raises the next loss."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lockstep = Lockstep(OPERATIONS, [0, 1, 2])
        self.epoch, self.size, self.identity = 0, 3, 0
        self.losses = LossState(survivable=True, locksteps={OPERATIONS: self.lockstep})
        self.process_sets: list[Any] = []
        self.names = Names(self.process_sets)
        self.coming: list[dict[int, int]] = []  # losses: for each, the progress of the other ranks
        self.told: list[tuple[int, int]] = []
        monkeypatch.setattr(losses, "_say_arrived", lambda *_: self._arrive())
        monkeypatch.setattr(losses, "recover", lambda *_: self._recover())
        monkeypatch.setattr(losses, "gather_by_core", self._gather)

    def _arrive(self) -> None:
        if self.coming:
            raise PeerLost("rank 2 is lost")

    def _recover(self) -> None:
        self.others = self.coming.pop(0)
        losses._meet_again(self)  # type: ignore[arg-type]
        self.epoch += 1

    def _gather(self, _: Any, value: Any, __: str) -> list[Any]:
        identity, mine, made, unsettled, tells = value
        self.told.append(tuple(mine[OPERATIONS]))
        return [(identity, mine, made, unsettled, tells)] + [
            (one, {OPERATIONS: (arrived, 0)}, [], False, False) for one, arrived in self.others.items()
        ]


def test_a_second_loss_in_a_repeat_does_not_bring_back_the_first_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first loss this rank had the result and another rank did not, so all repeat the operation. The second loss
    comes in the repeat. By then this rank no longer has the result."""
    world: Any = World(monkeypatch)
    world.coming = [{1: 0}, {1: 1}]
    tries: list[int] = []

    def work() -> int:
        tries.append(len(tries))
        if len(tries) == 2:
            raise PeerLost("rank 1 is lost")
        return tries[-1]

    found = losses.together(world, SimpleNamespace(), work, lockstep=world.lockstep)  # type: ignore[arg-type]
    assert world.told == [(1, 0), (0, 0)]
    assert (found, tries) == (2, [0, 1, 2])


def test_a_result_that_was_received_in_vain_is_not_that_of_the_next_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a part after its results have come. The next part has the same number, and is lost before its own."""
    world: Any = World(monkeypatch)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(losses, "_say_arrived", interrupted)
    with pytest.raises(KeyboardInterrupt):
        losses.together(world, SimpleNamespace(), lambda: 1, lockstep=world.lockstep)  # type: ignore[arg-type]
    monkeypatch.setattr(losses, "_say_arrived", lambda *_: None)
    world.coming, tries = [{1: 1}], list[int]()

    def work() -> int:
        tries.append(len(tries))
        if len(tries) == 1:
            raise PeerLost("rank 2 is lost")
        return 7

    assert losses.together(world, SimpleNamespace(), work, lockstep=world.lockstep) == 7  # type: ignore[arg-type]
    assert world.told == [(0, 0)]


@pytest.mark.parametrize("how", ["together", "again"])
def test_what_is_completed_is_a_new_beginning(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The limit is for consecutive recoveries in which no rank was missing."""
    world: Any = World(monkeypatch)
    world.losses.empty_recoveries = losses._EMPTY_RECOVERIES
    if how == "together":
        losses.together(world, SimpleNamespace(), lambda: 1, lockstep=world.lockstep)  # type: ignore[arg-type]
    else:
        losses.again(world, lambda: 1)
    assert world.losses.empty_recoveries == 0


def test_an_optimizer_that_is_dropped_frees_its_parameters() -> None:
    def work() -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        weight = weakref.ref(model.weight)
        del model, optimizer
        gc.collect()
        assert weight() is None

    sim.run(2, work, on_peer_lost="continue")


def test_ranks_that_continue_after_a_loss_do_not_join() -> None:
    """Such ranks count their steps together, to agree on the one to repeat."""

    def work() -> None:
        with pytest.raises(hvd.UsageError, match=r"join.* cannot be used with on_peer_lost='continue'"):
            hvd.join()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2

    sim.run(2, work, on_peer_lost="continue")


def test_a_timeline_goes_on_after_a_loss(tmp_path: Path) -> None:
    """Once stopped, it is complete JSON with the operations of both worlds."""
    path = tmp_path / "timeline.json"

    def work() -> None:
        hvd.start_timeline(str(path))
        hvd.allreduce(torch.ones(1), name="before")
        if hvd.rank() == 2:
            raise PeerLost("this rank ends here")
        hvd.allreduce(torch.ones(1), name="after")
        assert hvd.size() == 2
        hvd.allreduce(torch.ones(1), name="later")
        hvd.stop_timeline()
        if hvd.rank() == 0:
            json.loads(path.read_text())

    sim.run(3, work, on_peer_lost="continue")
    lanes = [event["args"]["name"] for event in json.loads(path.read_text()) if event["name"] == "thread_name"]
    assert all(any(lane.endswith(f".{name}") for lane in lanes) for name in ("before", "later")), lanes
