"""`hvd.elastic.run` without a lost rank: the functions that it calls again, their time, and their arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from elastic_models import adam, equal, model_of, take_step

import sordino.torch as hvd
from sordino import sim
from sordino.algorithms import LocalSGD
from sordino.errors import NotBuilt, PeerLost, SordinoError, UsageError
from sordino.runtime.context import current
from sordino.torch.elastic import ObjectState, State, TorchState

SIZES = [1, 2, 3, 5]


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "60")


@pytest.mark.parametrize("algorithm", ["allreduce", "layered", "crossover", "push-sum", "adpsgd", "caps", "local-sgd"])
@pytest.mark.parametrize("size", SIZES)
def test_faults_change_nothing(size, algorithm) -> None:
    """If all ranks come back, training has the same bits as without faults. (ADPSGD depends on timing, and buffers
    become the first rank's if a model is shared.)"""
    options = LocalSGD(interval=3) if algorithm == "local-sgd" else algorithm

    def train(faults: set[int]) -> Callable[[], tuple[Any, ...]]:
        def work() -> tuple[Any, ...]:
            left = set(faults)
            model = model_of(hvd.rank())
            optimizer = hvd.DistributedOptimizer(
                adam(model), named_parameters=model.named_parameters(), algorithm=options
            )
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            state = TorchState(model, optimizer, scheduler=scheduler, steps=0)
            calls = []

            @hvd.elastic.run
            def body(state: TorchState, much: int, *, more: int) -> str:
                assert (much, more) == (7, 8)
                calls.append(state.steps)
                while state.steps < 12:
                    fault = state.steps in left
                    left.discard(state.steps)
                    take_step(state, state.steps, fault=fault and state.steps % 2 == 1)
                    state.scheduler.step()
                    if fault:
                        raise hvd.HorovodInternalError("a fault")
                    state.steps += 1
                    if state.steps % 4 == 0:
                        state.commit()
                return "done"

            assert body(state, 7, more=8) == "done"
            return (
                calls,
                [p.detach() for p in model.parameters()],
                optimizer.param_groups[0]["lr"],
                scheduler.last_epoch,
            )

        return work

    smooth = sim.run(size, train(set()))
    shaken = sim.run(size, train({1, 3, 8, 10}))
    for (calls, mine, *rest), (once, wanted, *others) in zip(shaken, smooth):
        assert (calls, once) == ([0, 0, 0, 8, 8], [0])
        assert rest == others
        assert algorithm == "adpsgd" or equal(mine, wanted)


def test_callbacks_come_after_restoring_and_before_synchronizing() -> None:
    def work() -> list[tuple[str, Any]]:
        state = ObjectState(rate=1.0, log=None)
        told: list[tuple[str, Any]] = []
        state.register_reset_callbacks([lambda: told.append(("first", state.rate))])
        state.register_reset_callbacks([lambda: setattr(state, "rate", 10.0 + hvd.rank())])

        @hvd.elastic.run
        def train(state: ObjectState) -> None:
            told.append(("called", state.rate))
            state.rate = 5.0
            if len(told) == 1:
                raise hvd.HorovodInternalError("a fault")

        train(state)
        return told

    assert sim.run(3, work) == [[("called", 1.0), ("first", 1.0), ("called", 10.0)]] * 3


@pytest.mark.parametrize(("limit", "calls"), [(0, 1), (2, 3), (None, 200)])
def test_a_loop_of_faults_ends(limit, calls, caplog) -> None:
    def work() -> int:
        count = 0

        @hvd.elastic.run(reset_limit=limit)
        def train(state: State) -> None:
            nonlocal count
            count += 1
            if count < 200:
                raise hvd.HorovodInternalError("the disk is full")

        if limit is None:
            train(ObjectState())
        else:
            text = f"{limit + 1} faults, but reset_limit={limit}.*SordinoError: the disk is full"
            with pytest.raises(SordinoError, match=text):
                train(ObjectState())
        return count

    assert sim.run(2, work) == [calls] * 2
    assert caplog.text.count("2 ranks continue after SordinoError: the disk is full") == calls - 1


def test_by_default_a_loop_of_faults_ends_too() -> None:
    @hvd.elastic.run
    def train(state: State) -> None:
        raise hvd.HorovodInternalError("again")

    with pytest.raises(SordinoError, match="101 faults, but reset_limit=100"):
        sim.run(1, lambda: train(ObjectState()))


def test_interrupts_are_no_faults() -> None:
    """For example, interrupts by newcomers that were refused."""

    def work() -> int:
        state = ObjectState(step=0)

        @hvd.elastic.run(reset_limit=1)
        def train(state: Any) -> int:
            while state.step < 5:
                state.step += 1
                state.on_hosts_updated(float(state.step), 2)
                state.commit()
            if state.step == 5:
                state.step += 1
                state.save()
                raise hvd.HorovodInternalError("a fault")
            return int(state.step)

        return train(state)

    assert sim.run(2, work) == [6, 6]


@pytest.mark.parametrize("error", [UsageError, NotBuilt, ValueError, KeyboardInterrupt])
def test_what_would_only_come_again_ends_the_run(error) -> None:
    calls = []

    @hvd.elastic.run
    def train(state: State) -> None:
        calls.append(1)
        raise error("wrong")

    with pytest.raises(error, match="wrong"):
        sim.run(1, lambda: train(ObjectState()))
    assert calls == [1]


def test_where_ranks_cannot_go_on_the_loss_is_raised() -> None:
    """This world ends with any of its ranks."""
    lost = threading.Event()

    @hvd.elastic.run
    def train(state: State) -> None:
        if hvd.rank() == 1:
            lost.set()
            raise RuntimeError("out of memory")
        lost.wait()
        hvd.barrier()

    def work() -> None:
        if hvd.rank() == 1:
            train(ObjectState())
        else:
            with pytest.raises(PeerLost, match="out of memory"):
                train(ObjectState())

    with pytest.raises(RuntimeError, match="out of memory"):
        sim.run(3, work)


class OwnState(State):
    """A user's state."""

    def save(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""

    def sync(self) -> None:
        hvd.barrier()


def test_a_newcomer_is_settled_when_a_users_own_state_is_synchronized() -> None:
    def work() -> bool:
        current().losses.unsettled = True  # as after a growth
        return hvd.elastic.run(lambda _: current().losses.unsettled)(OwnState())

    assert sim.run(2, work) == [False, False]


def test_misuse_of_run_is_told() -> None:
    with pytest.raises(UsageError, match=r"reset_limit=-1\): must be at least 0"):
        hvd.elastic.run(reset_limit=-1)
    with pytest.raises(UsageError, match=r"train\(\) is decorated by elastic.run and needs a state.*not a dict"):
        hvd.elastic.run(_named_train)({})
    assert hvd.elastic.run(_named_train).__name__ == "train"


@pytest.mark.parametrize("ranks", ["0", "two", "-1", ""])
def test_a_wrong_number_of_least_ranks_is_told(ranks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_MIN_RANKS", ranks)

    def work() -> None:
        with pytest.raises(UsageError, match=f"SORDINO_MIN_RANKS='{ranks}' is not a number of ranks"):
            hvd.elastic.run(_named_train)(ObjectState())

    sim.run(1, work)


def _named_train(state: Any) -> None:
    raise AssertionError


_named_train.__name__ = "train"
