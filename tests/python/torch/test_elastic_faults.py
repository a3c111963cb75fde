"""`hvd.elastic` with lost ranks: the trained model is the result of the committed steps on the first model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from elastic_jobs import Job, Killed, Seat, wrapped
from elastic_models import data, line_of, loss_of, sgd
from hypothesis import given
from hypothesis import strategies as st

import sordino.torch as hvd
from sordino.runtime.context import current
from sordino.torch.elastic import ElasticSampler, TorchState

EPOCHS = 2
Point = tuple[int, int]  # a rank of the first world, and the number of the point at which it is lost


@pytest.fixture(autouse=True, scope="module")
def deadline() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SORDINO_TIMEOUT_S", "60")
        yield


def everybodys(rows: list[int]) -> list[list[int]]:
    """Return the rows of all ranks."""
    counts = hvd.allgather(torch.tensor([len(rows)]), name="counts").tolist()
    gathered = hvd.allgather(torch.tensor(rows), name="rows")
    return [part.tolist() for part in gathered.split(counts)]


class Training:
    """Training of one rank. It counts the points at which ranks may be lost, and is lost at some of them."""

    def __init__(self, length: int, batch: int, interval: int, losses: Sequence[Point]) -> None:
        self.rows = data(length)
        self.length, self.batch, self.interval = length, batch, interval
        seat = current()
        assert isinstance(seat, Seat)
        self.losses = losses
        self.fatal = {point for number, point in losses if number == seat.number}
        self.points = 0
        self.start = line_of(seat.number)

    def point(self) -> None:
        if self.points in self.fatal:
            raise Killed
        self.points += 1

    def run(self) -> TorchState:
        optimizer = wrapped(sgd(self.start), named_parameters=self.start.named_parameters())
        state = TorchState(
            self.start, optimizer, sampler=ElasticSampler(range(self.length), seed=1), epoch=0, steps=0, history=[]
        )
        state.register_reset_callbacks([self.point])
        hvd.elastic.run(self.train)(state)
        return state

    def train(self, state: TorchState) -> None:
        while state.epoch < EPOCHS:
            for number in range(-(-len(state.sampler) // self.batch)):
                self.point()
                rows = state.sampler.get_indices(number, self.batch)
                state.optimizer.zero_grad()
                loss_of(state.model, rows, self.rows).backward()
                self.point()
                state.optimizer.step()
                state.history.append((state.epoch, everybodys(rows)))
                state.sampler.record_batch(number, self.batch)
                state.steps += 1
                if state.steps % self.interval == 0:
                    self.point()
                    state.commit()
            state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)


def replayed(
    first: int, history: list[tuple[int, list[list[int]]]], rows: tuple[torch.Tensor, torch.Tensor]
) -> torch.nn.Module:
    """Return the model after one process has taken these steps from the first model of rank `first`."""
    model = line_of(first)
    optimizer = sgd(model)
    for _, ranks in history:
        optimizer.zero_grad()
        sum(loss_of(model, part, rows) / len(ranks) for part in ranks).backward()
        optimizer.step()
    return model


def assert_whole(training: Training, state: TorchState, padding: int) -> None:
    """Check that every epoch visits every row, and at most the padding twice, and that the model follows from the
    history."""
    for epoch in range(EPOCHS):
        visits = Counter(row for e, ranks in state.history if e == epoch for part in ranks for row in part)
        assert set(visits) == set(range(training.length))
        assert sum(visits.values()) - training.length <= padding
    assert state.steps == len(state.history)
    # A rank that is lost before its first step may have been lost before the others had its model.
    first = [0]
    while (first[-1], 0) in training.losses:
        first.append(first[-1] + 1)
    models = [replayed(rank, state.history, training.rows) for rank in first]
    assert any(
        all(
            torch.allclose(mine, one, rtol=1e-11, atol=1e-12) for mine, one in zip(state.model.parameters(), parameters)
        )
        for parameters in (list(model.parameters()) for model in models)
    )


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(
                st.tuples(st.integers(0, size - 1), st.integers(0, 40)),
                max_size=size - 1,
                unique_by=lambda loss: loss[0],
            ),
        )
    ),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_training_outlives_ranks(world, length, batch, interval) -> None:
    """Losses at any moment: in a step, before a commit, in the middle of a recovery from another loss."""
    size, losses = world

    def work() -> tuple[Training, TorchState]:
        training = Training(length, batch, interval, losses)
        return training, training.run()

    job = Job(size, work)
    results = [result for result in job.run() if result is not None]
    assert len(results) == size - len(job.lost) > 0
    for training, state in results:
        assert_whole(training, state, padding=sum(range(size + 1)))
