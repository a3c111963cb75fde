"""A loss in the middle of commits and synchronizations of `hvd.elastic`: all ranks agree on the saved state."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from elastic_jobs import Job, Killed, wrapped
from elastic_models import Values, copied, data, line_of, loss_of, sgd

import sordino.torch as hvd
from sordino.algorithms import LocalSGD
from sordino.errors import PeerLost
from sordino.runtime.context import current
from sordino.torch.elastic import ElasticSampler, TorchState


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TIMEOUT_S", "60")


class Stopped(TorchState):
    """State in which some ranks do not hear that a commit is complete: another rank is lost, so their wait fails."""

    def stop(self, commit: int, deaf: set[int], lost: set[int], met: threading.Barrier) -> None:
        self._rule = (commit, deaf, lost, met)
        self._commits = 0

    def commit(self) -> None:
        self._commits += 1
        super().commit()

    def _exchange(self, when: str) -> Any:
        told = super()._exchange(when)
        commit, deaf, lost, met = self._rule
        seat = current()
        if when == "commit" and self._commits == commit:
            met.wait(60)
            if seat.number in lost:
                raise Killed
            if seat.number in deaf:
                while True:
                    hvd.allreduce(torch.zeros(1), name="until it fails")
        return told


@pytest.mark.parametrize("deaf", [{0}, {1}, {0, 2}, {0, 1, 2}])
def test_who_is_stopped_in_a_commit_that_others_have_saved_has_it(deaf) -> None:
    """Rank 3 is lost in the second commit; some of the others know that the commit is complete. Every rank has its own
    model, which no other rank could restore."""

    def work() -> tuple[int, int, Values, Values]:
        model = line_of(0)
        optimizer = wrapped(sgd(model), named_parameters=model.named_parameters(), algorithm="crossover")
        state = Stopped(model, optimizer, sampler=ElasticSampler(range(40), seed=1), done=0)
        state.stop(2, deaf, {3}, met)
        models: list[list[torch.Tensor]] = []  # after each step

        @hvd.elastic.run
        def train(state: Stopped) -> tuple[int, int, Values, Values]:
            if models:
                return state.done, len(state.sampler.processed_indices), copied(state.model), models[state.done - 1]
            while True:
                optimizer.zero_grad()
                loss_of(state.model, state.sampler.get_indices(state.done, 2), data(40)).backward()
                state.optimizer.step()
                state.sampler.record_batch(state.done, 2)
                state.done += 1
                models.append(copied(state.model))
                state.commit()

        return train(state)

    met = threading.Barrier(4)
    job = Job(4, work)
    results = job.run()[:3]
    assert job.lost == [3]
    commits = 1 if deaf == {0, 1, 2} else 2  # no rank has saved the second
    for done, processed, now, then in results:
        assert (done, processed) == (commits, commits * 2 * 4)  # of four ranks, including the lost one
        assert all(torch.equal(mine, before) for mine, before in zip(now, then))
    assert not torch.equal(results[0][2][0], results[1][2][0])


def test_shards_are_put_together_before_a_rank_is_stopped() -> None:
    """Rank 1 hears of the second commit, but rank 0, in the same group, does not. Rank 0 must save it alone."""

    def work() -> tuple[int, Values, Values]:
        model = line_of(0)
        algorithm = LocalSGD(interval=100, group_size=2)
        optimizer = wrapped(sgd(model), named_parameters=model.named_parameters(), algorithm=algorithm)
        state = Stopped(model, optimizer, done=0)
        state.stop(2, {0}, {2, 3}, met)
        told: list[Values] = []

        @hvd.elastic.run
        def train(state: Stopped) -> tuple[int, Values, Values]:
            if told:
                return state.done, momenta(optimizer), told[1]
            while True:
                optimizer.zero_grad()
                loss_of(state.model, [state.done], data(4)).backward()
                optimizer.step()
                state.done += 1
                told.append(momenta(optimizer))
                state.commit()

        return train(state)

    met = threading.Barrier(4)
    for done, now, then in Job(4, work).run()[:2]:
        assert done == 2
        assert len(now) == 2 and all(torch.equal(mine, before) for mine, before in zip(now, then))


def momenta(optimizer: torch.optim.Optimizer) -> Values:
    return [entry["momentum_buffer"].clone() for entry in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("saves", [True, False])
def test_ranks_that_go_on_by_themselves_are_interrupted_together(saves) -> None:
    """If a step survives a loss, the function is interrupted on all ranks at once, and the rest is divided again."""

    def work() -> tuple[Any, ...]:
        sampler = ElasticSampler(range(30), seed=1)
        state = TorchState(sampler=sampler, steps=0, seen=[])
        calls: list[tuple[int, int, int]] = []
        reset: list[int] = []
        state.register_reset_callbacks([lambda: reset.append(hvd.size())])

        @hvd.elastic.run
        def train(state: TorchState) -> None:
            calls.append((state.steps, hvd.size(), len(sampler)))
            for number in range(len(sampler)):
                if state.steps == 3:
                    met.wait(60)  # all have the third
                    if current().number == 1:
                        raise Killed
                rows = sampler.get_indices(number, 1)
                try:
                    rows = hvd.allgather(torch.tensor(rows), name="rows").tolist()
                except PeerLost as error:
                    current().recover(error)
                    rows = hvd.allgather(torch.tensor(rows), name="rows").tolist()
                state.seen.append(rows)
                sampler.record_batch(number, 1)
                state.steps += 1
                if state.steps % 2 == 0:
                    state.commit() if saves or state.steps == 2 else state.check_host_updates()
            state.commit()

        train(state)
        return calls, reset, state.seen, sampler.processed_indices

    met = threading.Barrier(3)
    results = Job(3, work).run()
    assert results[1] is None
    for calls, reset, seen, processed in (results[0], results[2]):
        # The fourth step was interrupted. Its changes stay, even if they are not saved. The lost rank's third row is
        # unknown to the others, so it comes again.
        assert calls == [(0, 3, 10), (4, 2, -(-(30 - (2 * 3 + 2 * 2)) // 2))]
        assert reset == [2]
        assert [len(rows) for rows in seen] == [3] * 3 + [2] * (1 + 10)
        assert processed == set(range(30)) == {row for rows in seen for row in rows}


@pytest.mark.parametrize("exchange", ["allreduce", "sharded"])
def test_groups_that_lose_ranks_agree_within_the_groups_that_are_left(exchange) -> None:
    """The second and the third of three groups lose one rank each: the two that remain are one group with one model."""

    def work() -> tuple[Values, Values, Values]:
        number = current().number
        model = line_of(number)
        algorithm = LocalSGD(interval=100, group_size=2, exchange=exchange)
        optimizer = wrapped(sgd(model), named_parameters=model.named_parameters(), algorithm=algorithm)
        state = TorchState(model, optimizer, steps=0)
        models: list[Values] = []  # after each step

        @hvd.elastic.run
        def train(state: TorchState) -> tuple[Values, Values, Values]:
            if state.steps == 3:
                return models[2], copied(state.model), momenta(state.optimizer)
            while True:
                optimizer.zero_grad()
                if state.steps == 3:
                    met.wait(60)  # all have the third commit
                    if number in (3, 4):
                        raise Killed
                loss_of(state.model, [number // 2], data(4)).backward()
                state.optimizer.step()
                state.steps += 1
                models.append(copied(state.model))
                state.commit()

        return train(state)

    met = threading.Barrier(6)
    results = Job(6, work).run()
    left = [results[number] for number in (0, 1, 2, 5)]
    had = [[one.tolist() for one in then] for then, _, _ in left]
    now = [[one.tolist() for one in model] for _, model, _ in left]
    assert had[0] == had[1] != had[2] != had[3]
    assert now[0] == now[1] == had[0]
    assert now[2] == now[3] == had[2]
    momentum = [[one.tolist() for one in momenta] for *_, momenta in left]
    assert momentum[0] == momentum[1] != momentum[2] == momentum[3]
