"""AD-PSGD's pairing: in any order of messages both sides agree, nothing is lost, and no worker gets stuck."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.algorithms import ADPSGD
from sordino.algorithms.adpsgd.pairing import Average, Cancel, Pairing, Step
from sordino.runtime.exchange.actions import Message, Skip, Tell, Wake
from sordino.simulate.averaging import Averaging
from sordino.simulate.job import Job
from sordino.simulate.links import Links

PATIENCE = 1.0


class Network:
    """Workers and their messages. Messages between the same two workers stay in order; all others may overtake each
    other."""

    def __init__(self, size: int, seed: int) -> None:
        self.workers = [Pairing(rank, size, seed, PATIENCE) for rank in range(size)]
        self.values = [Fraction(3**rank) for rank in range(size)]
        self.engaged: list[Average | None] = [None] * size
        self.posted: dict[tuple[int, int], deque[Message]] = {}
        self.alarms: dict[int, float] = {}
        self.now = 0.0
        self.averaged = 0

    def does(self, rank: int, steps: list[Step]) -> None:
        for step in steps:
            if isinstance(step, Tell):
                self.posted.setdefault((rank, step.to), deque()).append(step.message)
            elif isinstance(step, Average):
                assert self.engaged[rank] is None  # in one averaging at a time
                assert step.peer != rank
                self.engaged[rank] = step
            elif isinstance(step, Cancel):
                assert self.engaged[rank] is not None
                self.engaged[rank] = None
            elif isinstance(step, Wake):
                self.alarms[rank] = step.at
            else:
                assert isinstance(step, Skip)

    def begin(self, rank: int) -> None:
        if not self.workers[rank].under_way:
            self.does(rank, self.workers[rank].begin(self.now))

    def arrivals(self) -> list[tuple[int, int]]:
        return sorted(way for way, messages in self.posted.items() if messages)

    def arrive(self, way: tuple[int, int]) -> None:
        sender, to = way
        self.does(to, self.workers[to].on_message(self.now, sender, self.posted[way].popleft()))

    def pairs(self) -> list[tuple[int, int]]:
        """Return the pairs in which both workers take part in the same averaging."""
        return [
            (rank, one.peer)
            for rank, one in enumerate(self.engaged)
            if one is not None and rank < one.peer and self.engaged[one.peer] == Average(rank, one.number)
        ]

    def exchange(self, pair: tuple[int, int]) -> None:
        mean = (self.values[pair[0]] + self.values[pair[1]]) / 2
        for rank in pair:
            self.values[rank], self.engaged[rank] = mean, None
        for rank in pair:
            self.does(rank, self.workers[rank].exchanged(self.now))
        self.averaged += 1

    def ring(self) -> None:
        """Advance the time to the next alarm."""
        if self.alarms:
            rank, at = min(self.alarms.items(), key=lambda one: (one[1], one[0]))
            del self.alarms[rank]
            self.now = max(self.now, at)
            self.does(rank, self.workers[rank].alarm(self.now))

    def quiet(self) -> bool:
        return not self.arrivals() and not self.pairs()


@given(st.integers(2, 6), st.integers(0, 1 << 20), st.booleans(), st.data())
def test_any_order_of_messages(size: int, seed: int, late: bool, data: st.DataObject) -> None:
    network = Network(size, seed)
    total = sum(network.values)
    for _ in range(data.draw(st.integers(0, 150))):
        what = data.draw(st.integers(0, 11 if late else 10))
        if what < 3:
            network.begin(data.draw(st.integers(0, size - 1)))
        elif what < 9 and network.arrivals():
            network.arrive(data.draw(st.sampled_from(network.arrivals())))
        elif what < 11 and network.pairs():
            network.exchange(data.draw(st.sampled_from(network.pairs())))
        elif what == 11:
            network.ring()  # an answer is late
        assert sum(network.values) == total
    for _ in range(100_000):  # and then all messages in flight arrive
        if network.quiet():
            break
        if network.arrivals():
            network.arrive(network.arrivals()[0])
        else:
            network.exchange(network.pairs()[0])
    assert network.quiet()
    assert network.engaged == [None] * size  # no worker waits for one that has gone
    assert not any(worker.under_way for worker in network.workers)
    assert sum(network.values) == total


def test_two_that_ask_each_other_average_once() -> None:
    network = Network(2, 0)
    network.begin(0)
    network.begin(1)
    while network.arrivals():
        network.arrive(network.arrivals()[0])
    assert network.pairs() == [(0, 1)]
    network.exchange((0, 1))
    assert network.values == [2, 2]
    assert network.averaged == 1
    assert not network.workers[0].under_way


def test_one_that_is_asked_in_an_averaging_declines() -> None:
    worker = Pairing(0, 3, 0, PATIENCE)
    assert worker.on_message(0.0, 1, ("average", 7, 5)) == [Tell(1, ("yes", 7)), Average(1, 7)]
    assert worker.on_message(0.0, 2, ("average", 9, 5)) == [Tell(2, ("no", 9))]
    assert not worker.under_way  # an averaging of another worker is not its own
    assert worker.exchanged(1.0) == []
    assert worker.on_message(1.0, 2, ("average", 10, 5))[0] == Tell(2, ("yes", 10))


def test_declines_count_for_one_averaging() -> None:
    """A worker that is declined from time to time gives up no later averaging because of that."""
    worker = Pairing(0, 3, 0, PATIENCE)

    def asked(steps: list[Step]) -> tuple[int, int]:
        ((peer, message),) = [(step.to, step.message) for step in steps if isinstance(step, Tell)]
        return peer, int(message[1])

    for _ in range(3):
        peer, number = asked(worker.begin(0.0))
        for _ in range(7):  # one less than the limit for giving up
            peer, number = asked(worker.on_message(0.0, peer, ("no", number)))
        assert worker.on_message(0.0, peer, ("yes", number)) == [Average(peer, number)]
        assert worker.exchanged(0.0) == []
    peer, number = asked(worker.begin(0.0))
    for _ in range(7):
        peer, number = asked(worker.on_message(0.0, peer, ("no", number)))
    assert worker.on_message(0.0, peer, ("no", number)) == [Skip()]
    assert not worker.under_way


def test_what_is_begun_in_anothers_averaging_follows_it() -> None:
    worker = Pairing(0, 3, 0, PATIENCE)
    worker.on_message(0.0, 1, ("average", 7, 5))
    assert worker.begin(0.5) == []
    asks(worker.exchanged(1.0))
    assert worker.under_way


def asks(steps: list[Step]) -> tuple[int, float | str]:
    assert isinstance(steps[0], Tell)
    assert steps[0].message[0] == "average"
    return steps[0].to, steps[0].message[1]


def test_who_is_declined_asks_another_and_gives_up_after_some() -> None:
    worker = Pairing(0, 3, 0, PATIENCE)
    steps = worker.begin(0.0)
    for _ in range(7):
        peer, number = asks(steps)
        steps = worker.on_message(0.0, peer, ("no", number))
    peer, number = asks(steps)
    assert worker.on_message(0.0, peer, ("no", number)) == [Skip()]
    assert not worker.under_way


def test_who_says_nothing_is_left_out_until_it_is_heard_of_and_its_late_yes_is_cancelled() -> None:
    worker = Pairing(0, 3, 0, PATIENCE)
    silent, number = asks(worker.begin(0.0))
    assert worker.alarm(0.5) == []
    other, again = asks(worker.alarm(1.0))
    assert {silent, other} == {1, 2}
    for _ in range(5):
        peer, again = asks(worker.on_message(1.0, other, ("no", again)))
        assert peer == other
    assert worker.on_message(2.0, silent, ("yes", number)) == [Tell(silent, ("cancel", number))]
    peers = set()
    for _ in range(40):
        peer, again = asks(worker.on_message(2.0, peer, ("no", again)) if worker.under_way else worker.begin(2.0))
        peers.add(peer)
        worker.on_message(2.0, peer, ("yes", again))
        worker.exchanged(2.0)
    assert peers == {1, 2}


def test_losses() -> None:
    worker = Pairing(0, 3, 0, PATIENCE)
    asked, _ = asks(worker.begin(0.0))
    other, number = asks(worker.lost(0.5, asked))
    assert other == 3 - asked
    assert worker.on_message(0.6, other, ("yes", number)) == [Average(other, int(number))]
    assert worker.lost(0.7, other) == []  # the averaging fails by itself
    assert worker.failed(0.7, other) == [Skip()]
    assert not worker.under_way


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_in_virtual_time_nobody_is_stuck_and_all_come_together(overlap: int) -> None:
    compute = np.array([2e-3, 2e-3, 5e-3, 10e-3, 3e-3])
    job = Job(
        ADPSGD(interval=2, overlap=overlap, patience=0.5), 5, Links([1.0, 1.0, 10.0, 0.1, 1.0], 2e-3), compute,
        2.0**16, seconds=2.0, data="none", points=1, kills=((1, 0.5),),
    )  # fmt: skip
    outcome = Averaging(job, lambda _: None).run()
    alive = [0, 2, 3, 4]
    assert all(outcome.record.pulls[alive] > 20)
    assert outcome.record.pulls.sum() % 2 == 0  # both sides or neither
    assert all(outcome.record.steps[alive] > 60)
    apart = Averaging(
        Job(ADPSGD(interval=10**6), 5, job.links, compute, 2.0**16, seconds=2.0, data="none", points=1), lambda _: None
    ).run()
    assert outcome.final["consensus_distance"] < 0.5 * apart.final["consensus_distance"]


def test_a_higher_question_takes_back_ones_own() -> None:
    """If all workers ask at once, one must give way, or all are declined forever."""
    worker = Pairing(0, 9, 0, PATIENCE)
    asked = worker.begin(0.0)[0]
    assert isinstance(asked, Tell)
    _, number, priority = asked.message
    other = next(rank for rank in range(1, 9) if rank != asked.to)
    assert worker.on_message(0.1, other, ("average", 77, priority - 1)) == [Tell(other, ("no", 77))]
    assert worker.on_message(0.2, other, ("average", 86, priority + 1)) == [
        Tell(other, ("yes", 86)),
        Average(other, 86),
    ]
    assert worker.on_message(0.3, asked.to, ("yes", number)) == [Tell(asked.to, ("cancel", number))]
    assert worker.under_way
    again = worker.exchanged(0.4)[0]
    assert isinstance(again, Tell) and again.message[0] == "average"


def test_of_many_that_ask_at_once_most_find_somebody() -> None:
    size = 60
    workers = [Pairing(rank, size, 3, PATIENCE) for rank in range(size)]
    messages = [(rank, step) for rank, worker in enumerate(workers) for step in worker.begin(0.0)]
    for _ in range(3):  # messages of all workers arrive at the same time
        sent, messages = messages, []
        for sender, step in sent:
            if isinstance(step, Tell):
                messages += [(step.to, more) for more in workers[step.to].on_message(0.0, sender, step.message)]
    assert sum(worker._engaged for worker in workers) > size / 3


def test_no_two_averagings_have_one_number() -> None:
    size, numbers = 4, []
    for rank in range(size):
        worker = Pairing(rank, size, 0, PATIENCE)
        for turn in range(5):
            (question, _) = worker.begin(turn)
            assert isinstance(question, Tell)
            numbers.append(question.message[1])
            assert worker.on_message(turn, question.to, ("yes", numbers[-1])) == [Average(question.to, numbers[-1])]
            worker.exchanged(turn)
    assert len(set(numbers)) == len(numbers) == 20


def test_a_worker_that_declines_takes_part_again_when_it_may() -> None:
    worker = Pairing(0, 2, 0, PATIENCE)
    worker.declining = True
    assert worker.on_message(0.0, 1, ("average", 1, 5)) == [Tell(1, ("no", 1))]
    worker.declining = False
    assert worker.on_message(0.0, 1, ("average", 3, 5)) == [Tell(1, ("yes", 3)), Average(1, 3)]
