"""Choice of the peer and the time of each pull: the policy objects, driven by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.algorithms.draws import Draws, Peers
from sordino.algorithms.scheduled_pull.manager import Manager, Pool
from sordino.algorithms.scheduled_pull.negotiation import Autonomous, Managed
from sordino.algorithms.scheduled_pull.schedule import Action, Pull, PullAfter, PullFirst, update_time
from sordino.runtime.exchange.actions import Skip, Tell, Wake, Warn

PATIENCE = 1.0


@pytest.mark.parametrize(
    ("estimate", "measured", "expected"),
    [
        (math.inf, 4.0, 4.0),  # time was never measured
        (4.0, 2.5, 2.5),
        (4.0, 3.0, 3.5),  # (1 - threshold) estimate itself is not too far below
        (4.0, 4.0, 4.0),
        (4.0, 4.5, 4.25),
        (4.0, 5.0, 5.0),  # (1 + threshold) estimate itself is too far above
        (4.0, 9.0, 9.0),
    ],
)
def test_update_time_is_the_sources(estimate: float, measured: float, expected: float) -> None:
    assert update_time(estimate, measured, threshold=0.25) == expected


def test_peers_are_all_but_oneself_and_those_that_are_gone() -> None:
    peers = Peers(1, 5)
    peers.discard(3)
    draws = Draws(1, 7)
    assert {peers.draw(draws) for _ in range(200)} == {0, 2, 4}
    peers.add(3)
    assert len(peers) == 4
    for rank in range(5):
        peers.discard(rank)
    assert len(peers) == 0
    assert peers.draw(draws) is None


def test_a_pool_draws_all_as_likely() -> None:
    pool, draws = Pool(range(4)), Draws(0, 3)
    counts = np.bincount([pool.draw(draws, but=2) for _ in range(3000)], minlength=4)
    assert counts[2] == 0
    assert all(900 < count < 1100 for count in counts[[0, 1, 3]])


# ---- the simple modes ------------------------------------------------------------------------------------------------


def test_without_overlap_one_pulls_when_the_window_ends() -> None:
    worker = PullAfter(0, 2, 0)
    assert worker.window(0.0, 1.0) == []
    assert worker.ended(1.0) == [Pull(1, 1.0)]


def test_naive_overlap_pulls_when_the_window_begins() -> None:
    worker = PullFirst(0, 2, 0)
    assert worker.window(3.0, 4.0) == [Pull(1, 3.0)]
    assert worker.failed(3.5, 1) == [Tell(1, ("there?",)), Skip()]  # no peer is left
    worker.on_message(3.6, 1, ("free",))
    assert worker.window(4.0, 5.0) == [Pull(1, 4.0)]


def test_a_peer_that_was_silent_comes_back_when_it_answers() -> None:
    worker, silent = PullFirst(0, 2, 0), PullFirst(1, 2, 0)
    worker.window(0.0, 1.0)
    question = worker.failed(1.0, 1)[0]
    assert isinstance(question, Tell)
    assert worker.window(2.0, 3.0) == [Skip()]
    answer = silent.on_message(2.5, 0, question.message)
    assert answer == [Tell(0, ("here",))]
    assert worker.on_message(3.0, 1, answer[0].message) == []
    assert worker.window(3.0, 4.0) == [Pull(1, 3.0)]


def test_a_manager_that_was_silent_is_obeyed_again_once_it_speaks() -> None:
    worker = managed()
    worker.window(0.0, math.inf)
    worker.alarm(PATIENCE, math.inf)
    assert not worker.managed
    assert worker.on_message(2.0, 0, ("grant", 1, 2, 0.0)) == [Pull(2, 2.0)]
    assert worker.managed


# ---- the manager -----------------------------------------------------------------------------------------------------


def test_the_manager_lets_pulls_end_with_the_window() -> None:
    manager = Manager(2, 0, 0.25)
    assert manager.get_start_time(0, 10.0) == (1, -math.inf)  # never measured: at once
    assert manager.get_start_time(1, 10.0) == (0, -math.inf)
    assert manager.get_start_time(0, 10.0) is None  # worker 1 is taken
    manager.update_information(0, 1, 4.0)
    assert manager.estimate(0, 1) == manager.estimate(1, 0) == 4.0
    assert manager.get_start_time(0, 10.0) == (1, 6.0)
    manager.update_information(1, 0, 4.5)
    manager.update_information(0, 1, None)  # the pull failed, and gives no time
    assert manager.estimate(0, 1) == 4.25


def test_the_manager_puts_askers_in_line_until_somebody_is_free() -> None:
    manager = Manager(3, 0, 0.1)
    manager.lost(0.0, 2)
    assert manager.on_message(0.0, 0, ("ask", 1, 5.0)) == [Tell(0, ("grant", 1.0, 1, -math.inf))]
    manager.lost(0.0, 1)
    assert manager.on_message(0.0, 0, ("ask", 2, 5.0)) == [Tell(0, ("line", 2.0))]  # only the worker itself is there
    granted = manager.on_message(1.0, 1, ("ask", 7, 5.0))  # it is alive after all
    assert {(action.to, action.message[:3]) for action in tells(granted)} == {
        (0, ("grant", 2.0, 1)),
        (1, ("grant", 7.0, 0)),
    }


def test_a_node_that_vanishes_is_given_to_nobody_and_comes_back_with_its_first_message() -> None:
    manager = Manager(3, 0, 0.1)
    manager.lost(0.0, 2)
    for _ in range(20):
        assert manager.get_start_time(0, 1.0) == (1, -math.inf)
        manager.update_information(0, 1, None)
    manager.on_message(1.0, 2, ("done", 0, -1.0))
    found = set()
    for _ in range(50):
        grant = manager.get_start_time(0, 1.0)
        assert grant is not None
        found.add(grant[0])
        manager.update_information(0, grant[0], None)
    assert found == {1, 2}


def test_a_node_whose_puller_dies_is_free_again() -> None:
    manager = Manager(3, 0, 0.1)
    peer = next(iter(tells(manager.on_message(0.0, 0, ("ask", 1, 1.0))))).message[2]
    manager.lost(0.5, 0)
    other = 3 - int(peer)
    assert [action.message[:3] for action in tells(manager.on_message(1.0, other, ("ask", 1, 2.0)))] == [
        ("grant", 1.0, peer)
    ]


@given(st.integers(2, 9), st.integers(0, 1 << 20), st.data())
def test_the_manager_never_leaves_an_asker_with_only_itself(size: int, seed: int, data: st.DataObject) -> None:
    manager = Manager(size, seed, 0.1)
    pulls: dict[int, int] = {}
    for _ in range(60):
        worker = data.draw(st.integers(0, size - 1))
        if worker in pulls:
            actions = manager.on_message(0.0, worker, ("done", pulls.pop(worker), 1.0))
            assert actions == []
        else:
            (action,) = tells(manager.on_message(0.0, worker, ("ask", 1, 9.0)))
            word, peer = action.message[0], action.message[2]
            assert (action.to, word) == (worker, "grant")
            assert peer != worker
            assert peer not in pulls.values()
            pulls[worker] = int(peer)


def tells(actions: list[Action]) -> list[Tell]:
    return [action for action in actions if isinstance(action, Tell)]


# ---- autonomous workers ----------------------------------------------------------------------------------------------


def autonomous(rank: int, size: int, seed: int = 0) -> Autonomous:
    return Autonomous(rank, size, seed, 0.25, PATIENCE)


def test_an_autonomous_worker_starts_late_once_it_knows_how_long_pulls_take() -> None:
    worker = autonomous(0, 2)
    assert worker.window(0.0, math.inf) == [Tell(1, ("may", 1, 0.0, 0.0)), Wake(PATIENCE)]
    assert worker.on_message(0.0, 1, ("yes", 1.0, 0.0)) == [Pull(1, 0.0)]
    worker.began(0.0)
    assert worker.pulled(2.0, 1, 2.0) == [Tell(1, ("free",))]
    assert worker.window(10.0, 20.0) == [Wake(20.0 - 1.25 * 2.0)]
    assert worker.alarm(17.5, 20.0) == [Tell(1, ("may", 2, 0.5, 2.0)), Wake(17.5 + PATIENCE)]
    assert worker.on_message(17.75, 1, ("yes", 2.0, 0.0)) == [Pull(1, 18.0)]
    worker.began(18.0)
    worker.pulled(20.0, 1, 2.0)
    (wake,) = worker.window(20.0, 30.0)  # asking took 0.25 s
    assert wake == Wake(30.0 - 1.25 * 2.0 - 6 * 0.25)


def test_of_two_that_ask_one_is_refused() -> None:
    asked = autonomous(2, 3)
    assert asked.on_message(0.0, 0, ("may", 5, 1.0, 2.0)) == [Tell(0, ("yes", 5.0, 0.0))]
    assert asked.on_message(0.5, 1, ("may", 8, 0.0, 2.0)) == [Tell(1, ("no", 8.0, 2.5))]  # free in 2.5 s
    asked.on_message(3.0, 0, ("free",))
    assert asked.on_message(3.0, 1, ("may", 8, 0.0, 2.0)) == [Tell(1, ("yes", 8.0, 0.0))]


def test_who_is_refused_asks_another() -> None:
    worker = autonomous(0, 3)
    (tell, _) = worker.window(0.0, math.inf)
    assert isinstance(tell, Tell)
    (again, _) = worker.on_message(0.1, tell.to, ("no", 1.0, 5.0))
    assert isinstance(again, Tell)
    assert again == Tell(3 - tell.to, ("may", 1, 0.0, 0.0))


def test_an_answer_that_comes_too_late_frees_who_gave_it() -> None:
    worker = autonomous(0, 3)
    (first, _) = worker.window(0.0, math.inf)
    assert isinstance(first, Tell)
    (second, _) = worker.alarm(PATIENCE, math.inf)  # no answer, so it asks another
    assert isinstance(second, Tell)
    assert second.to == 3 - first.to
    assert worker.on_message(2.0, first.to, ("yes", 1.0, 0.0)) == [Tell(first.to, ("free",))]
    assert worker.on_message(2.0, second.to, ("yes", 1.0, 0.0)) == [Pull(second.to, 2.0)]


def trader(size: int) -> tuple[Autonomous, Tell]:
    """Return a worker that was refused so often that it offers to trade, and its offer."""
    worker = autonomous(0, size)
    (tell, _) = worker.window(0.0, math.inf)
    for _ in range(3):
        assert isinstance(tell, Tell)
        assert tell.message[0] == "may"
        (tell, _) = worker.on_message(0.0, tell.to, ("no", 1.0, 9.0))
    assert isinstance(tell, Tell)
    return worker, tell


def test_who_is_refused_by_all_trades() -> None:
    worker, offer = trader(size=4)
    assert offer.message[0] == "trade"
    assert worker.on_message(0.0, 3, ("may", 1, 0.0, 1.0)) == [
        Tell(3, ("no", 1.0, 0.0))
    ]  # it keeps itself for the trade
    other = 1 if offer.to != 1 else 2
    assert worker.on_message(0.0, offer.to, ("yes", 1.0, 0.0, other)) == [Pull(offer.to, 0.0)]
    assert tells(worker.on_message(0.0, 3, ("may", 1, 0.0, 1.0)))[0].message[0] == "no"  # `other` pulls from it now
    worker.on_message(1.0, other, ("free",))
    assert worker.on_message(1.0, 3, ("may", 2, 0.0, 1.0)) == [Tell(3, ("yes", 2.0, 0.0))]


def test_who_is_asked_to_trade_moves_its_puller() -> None:
    asked = autonomous(1, 4)
    asked.on_message(0.0, 2, ("may", 1, 5.0, 1.0))  # worker 2 pulls from it in 5 s
    assert asked.on_message(1.0, 0, ("trade", 3, 4.0, 1.0)) == [Tell(2, ("move", 0))]
    assert asked.on_message(1.1, 3, ("trade", 9, 4.0, 1.0))[0].message[0] == "no"  # one trade at a time
    assert asked.on_message(1.2, 2, ("moved",)) == [Tell(0, ("yes", 3.0, 0.0, 2))]
    asked.on_message(1.3, 2, ("free",))  # a worker that moved its pull frees its peer
    assert tells(asked.on_message(1.4, 3, ("may", 9, 0.0, 1.0)))[0].message[0] == "no"
    asked.on_message(6.0, 0, ("free",))
    assert tells(asked.on_message(6.0, 3, ("may", 9, 0.0, 1.0)))[0].message[0] == "yes"


@pytest.mark.parametrize(("begun", "answer"), [(False, "moved"), (True, "stay")])
def test_a_puller_moves_unless_it_has_begun(begun: bool, answer: str) -> None:
    puller = autonomous(2, 3)
    (tell, _) = puller.window(0.0, math.inf)
    assert isinstance(tell, Tell)
    puller.on_message(0.0, tell.to, ("yes", 1.0, 0.0))
    puller.began(0.0)
    puller.pulled(1.0, tell.to, 1.0)
    puller.window(10.0, 20.0)
    (tell, _) = puller.alarm(19.0 - 0.5, 20.0)
    assert isinstance(tell, Tell)
    armed = puller.on_message(18.5, tell.to, ("yes", 2.0, 0.0))
    known = isinstance(armed[0], Pull) and armed[0].start > 18.5
    if begun or not known:
        puller.began(19.0)
    actions = puller.on_message(18.75, tell.to, ("move", 1 - tell.to))
    assert actions[0] == Tell(tell.to, (answer if known else "stay",))
    assert len(actions) == (2 if known and not begun else 1)


def test_a_refused_trade_goes_on_asking() -> None:
    worker, offer = trader(size=4)
    (tell, _) = worker.on_message(0.0, offer.to, ("no", 1.0, 1.0))
    assert isinstance(tell, Tell)
    assert tell.message[0] == "trade"


def test_a_peer_that_failed_is_left_out_until_it_is_heard_of() -> None:
    worker = autonomous(0, 3)
    (tell, _) = worker.window(0.0, math.inf)
    assert isinstance(tell, Tell)
    worker.on_message(0.0, tell.to, ("yes", 1.0, 0.0))
    worker.began(0.0)
    (instead, _) = worker.failed(1.0, tell.to)
    assert isinstance(instead, Tell)
    assert instead.to == 3 - tell.to
    for window in range(20):
        (again, _) = worker.window(2.0 + window, math.inf)
        assert isinstance(again, Tell)
        assert again.to == instead.to
    worker.on_message(30.0, tell.to, ("free",))
    found = {action.to for window in range(50) for action in tells(worker.window(31.0 + window, math.inf))}
    assert found == {1, 2}


def test_the_loss_of_who_is_asked_is_an_answer() -> None:
    worker = autonomous(0, 3)
    (tell, _) = worker.window(0.0, math.inf)
    assert isinstance(tell, Tell)
    (instead, _) = worker.lost(0.5, tell.to)
    assert isinstance(instead, Tell)
    assert instead.to == 3 - tell.to
    assert worker.lost(0.6, instead.to) == [Skip()]


# ---- workers with a manager ------------------------------------------------------------------------------------------


def managed(rank: int = 1, size: int = 3) -> Managed:
    return Managed(rank, size, 0, 0.25, PATIENCE, manager=0)


def test_a_managed_worker_does_what_the_manager_says() -> None:
    worker = managed()
    assert worker.window(0.0, math.inf) == [Tell(0, ("ask", 1, 0.0)), Wake(PATIENCE)]
    assert worker.on_message(0.1, 0, ("grant", 1.0, 2, -math.inf)) == [Pull(2, 0.1)]
    worker.began(0.1)
    assert worker.pulled(2.1, 2, 2.0) == [Tell(0, ("done", 2, 2.0))]
    (wake,) = worker.window(10.0, 20.0)
    assert isinstance(wake, Wake)
    assert worker.alarm(wake.at, 20.5)[0] == Tell(0, ("ask", 2, 20.5))
    assert worker.on_message(wake.at, 0, ("grant", 2.0, 2, 18.5)) == [Pull(2, 18.5)]
    assert worker.failed(19.0, 2)[:2] == [Tell(0, ("failed", 2)), Tell(0, ("ask", 2, 20.5))]


def test_a_grant_for_an_earlier_window_is_given_back() -> None:
    worker = managed()
    worker.window(0.0, math.inf)
    worker.window(1.0, math.inf)
    assert worker.on_message(1.1, 0, ("grant", 1.0, 2, 0.0)) == [Tell(0, ("done", 2, -1.0))]


def test_a_worker_in_line_waits_beyond_its_patience() -> None:
    worker = managed()
    worker.window(0.0, math.inf)
    worker.on_message(0.1, 0, ("line", 1.0))
    assert worker.alarm(PATIENCE, math.inf)[0] == Tell(0, ("ask", 1, PATIENCE))
    assert worker.managed


@pytest.mark.parametrize("in_line", [False, True])
def test_who_waits_for_a_grant_skips_when_nobody_is_left(in_line: bool) -> None:
    """This includes the manager itself as the last worker, which would wait in its own queue."""
    manages = Managed(0, 3, 0, 0.25, PATIENCE, manager=0)
    manages.window(0.0, math.inf)
    if in_line:
        manages.on_message(0.1, 0, ("line", 1.0))
    assert manages.lost(0.2, 2) == []
    assert manages.lost(0.3, 1) == [Skip()]
    assert manages.managed
    assert manages.ended(0.4) == [Skip()]
    assert manages.on_message(0.5, 0, ("grant", 1.0, 2, 0.0)) == [Tell(0, ("done", 2, -1.0))]  # it comes too late


def test_when_the_manager_dies_a_worker_says_so_and_goes_on_alone() -> None:
    worker = managed()
    worker.window(0.0, math.inf)
    warning, question, _ = worker.lost(0.5, 0)
    assert isinstance(warning, Warn)
    assert "rank 0" in warning.text
    assert "rank 1" in warning.text
    assert question == Tell(2, ("may", 1, 0.0, 0.0))
    assert worker.on_message(0.6, 2, ("yes", 1.0, 0.0)) == [Pull(2, 0.6)]
    assert not worker.managed


def test_when_the_manager_falls_silent_a_worker_says_so_and_goes_on_alone() -> None:
    worker = managed()
    worker.window(0.0, math.inf)
    assert worker.alarm(0.5 * PATIENCE, math.inf) == []
    warning, question, _ = worker.alarm(PATIENCE, math.inf)
    assert isinstance(warning, Warn)
    assert "has not answered for 1 s" in warning.text
    assert isinstance(question, Tell)
    assert question.message[0] == "may"


def test_a_pair_that_never_met_is_expected_to_take_the_longest_of_either() -> None:
    for seed in range(8):
        manager = Manager(4, seed, 0.1)
        assert manager.get_start_time(0, 100.0)[1] == -math.inf
        manager = Manager(4, seed, 0.1)
        manager.update_information(0, 1, 2.0)
        manager.update_information(2, 3, 5.0)
        peer, start = manager.get_start_time(0, 100.0)
        assert start == (98.0 if peer == 1 else 95.0)
    worker = Autonomous(0, 20, 0, 0.1, 60.0)
    first = tells(worker.window(0.0, math.inf))[0].to
    worker.on_message(0.0, first, ("yes", 1, 0.0))
    worker.pulled(2.0, first, 2.0)
    worker.ended(10.0)
    worker.window(10.0, 30.0)
    asked = tells(worker.alarm(25.0, 30.0))[0].to
    assert asked != first
    assert worker.on_message(25.0, asked, ("yes", 2, 3.0)) == [Pull(asked, 27.0)]
