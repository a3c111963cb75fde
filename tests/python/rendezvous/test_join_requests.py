"""Join requests at the launcher: newcomers ask, the first rank answers, and strangers change nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from pace import HANG_S
from test_socket_rendezvous import TOKEN, Launcher, hung_up_on

from sordino.errors import Timeout, TransportError
from sordino.rendezvous.frames import frame
from sordino.rendezvous.join_requests import Verdict
from sordino.rendezvous.sockets import NO_NUMBER, SocketRendezvous

Answer = Future[tuple[Verdict, bytes]]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def asking(launcher: Launcher, threads: ThreadPoolExecutor, first: SocketRendezvous, number: int) -> Answer:
    """Let a process ask to join, and wait until the first rank can see it."""
    answer = threads.submit(launcher.rank(number).ask_to_join, f"process {number}".encode(), 60.0)
    while number not in [one for one, _ in first.newcomers(HANG_S)]:
        assert not answer.done()
    return answer


def test_the_first_rank_answers(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    first = launcher_of_ranks.rank(0)
    assert first.newcomers(HANG_S) == []
    answers = {number: asking(launcher_of_ranks, threads, first, number) for number in (4, 5)}
    assert first.newcomers(HANG_S) == [(4, b"process 4"), (5, b"process 5")]
    first.answer(5, Verdict.REFUSED, b"another model")
    assert answers[5].result(10) == (Verdict.REFUSED, b"another model")
    assert first.newcomers(HANG_S) == [(4, b"process 4")]
    first.answer(4, Verdict.INVITED, b"the plan")
    assert answers[4].result(10) == (Verdict.INVITED, b"the plan")
    first.answer(4, Verdict.INVITED, b"again")  # no process waits
    assert first.gather("x", [0], b"me") == [b"me"]


def test_a_newcomer_that_has_ended_waits_no_more(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    first = launcher_of_ranks.rank(0)
    answer = asking(launcher_of_ranks, threads, first, 4)
    launcher_of_ranks.orders.send(b"\x04")
    while first.newcomers(HANG_S):
        pass
    launcher_of_ranks.orders.send(b"\x00")  # the first rank ends, too; no answer goes to the newcomer that has ended
    launcher_of_ranks.end()
    with pytest.raises(TransportError, match="the launcher that started this rank is gone"):
        answer.result(10)


def test_the_job_is_over_when_only_newcomers_are_left(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    first, second = launcher_of_ranks.rank(0), launcher_of_ranks.rank(1)
    assert second.newcomers(HANG_S) == []  # so the launcher knows of it
    answer = asking(launcher_of_ranks, threads, first, 4)
    launcher_of_ranks.orders.send(b"\x00")
    assert len(second.newcomers(HANG_S)) == 1
    launcher_of_ranks.orders.send(b"\x01")
    assert len(first.newcomers(HANG_S)) == 1  # ranks 2 and 3 have not connected yet
    for rank in (b"\x02", b"\x03"):
        launcher_of_ranks.orders.send(rank)
    assert answer.result(10) == (Verdict.OVER, b"")


def test_a_newcomer_comes_before_all_ranks(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    answer = threads.submit(launcher_of_ranks.rank(4).ask_to_join, b"process 4", 60.0)
    while 4 not in launcher_of_ranks.server._join_requests.waiting:
        assert not answer.done()
    first = launcher_of_ranks.rank(0)
    assert first.newcomers(HANG_S) == [(4, b"process 4")]
    first.answer(4, Verdict.INVITED, b"the plan")
    assert answer.result(10) == (Verdict.INVITED, b"the plan")


def test_numbers_are_new(launcher_of_ranks: Launcher) -> None:
    asking = launcher_of_ranks.rank(NO_NUMBER)
    assert [asking.new_number() for _ in range(3)] == [4, 5, 6]


def test_a_foreign_process_that_leaves_has_ended(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    """The launcher has not started the process, so it learns of the end from the connection."""
    first = launcher_of_ranks.rank(0)
    number = launcher_of_ranks.rank(NO_NUMBER).new_number()
    stranger = launcher_of_ranks.rank(number)
    threads.submit(stranger.ask_to_join, b"", 60.0)
    while not first.newcomers(HANG_S):
        pass
    stranger._socket.shutdown(2)
    while first.newcomers(HANG_S):
        pass


def test_a_warning_after_a_long_wait(
    launcher_of_ranks: Launcher, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    first = launcher_of_ranks.rank(0)
    answer = threads.submit(launcher_of_ranks.rank(4).ask_to_join, b"", 0.05)
    seen = threading.Event()
    while not seen.wait(0.02):
        if "lets newcomers in" in caplog.text or "let newcomers in" in caplog.text:
            seen.set()
    assert "process 4 has waited 0 s to join the job" in caplog.text
    first.answer(4, Verdict.INVITED, b"plan")
    assert answer.result(10) == (Verdict.INVITED, b"plan")


RANK = frame({"rank": 0}, TOKEN)


@pytest.mark.parametrize(
    "data",
    (
        pytest.param(frame({"join": "who"}, b"x" * 64), id="no token"),
        pytest.param(frame({"rank": 4}, b"x" * 64) + frame({"join": "ask"}, b""), id="another token"),
        pytest.param(RANK + frame({"join": "window"}, b""), id="an unknown word"),
        pytest.param(RANK + frame({"join": "invited"}, b""), id="an answer to nobody"),
        pytest.param(RANK + frame({"join": "invited", "to": "x"}, b""), id="an answer to no number"),
        pytest.param(RANK + frame({"join": ["ask"]}, b""), id="no word"),
    ),
)
def test_strangers_change_nothing(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor, data: bytes) -> None:
    first = launcher_of_ranks.rank(0)
    answer = asking(launcher_of_ranks, threads, first, 4)
    assert hung_up_on(launcher_of_ranks, data)
    assert first.newcomers(HANG_S) == [(4, b"process 4")]
    first.answer(4, Verdict.INVITED, b"plan")
    assert answer.result(10) == (Verdict.INVITED, b"plan")


def test_an_introduction_of_any_bytes(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    first = launcher_of_ranks.rank(0)
    answer = threads.submit(launcher_of_ranks.rank(4).ask_to_join, b"\xff\xfe", 60.0)
    while not first.newcomers(HANG_S):
        pass
    first.answer(4, Verdict.REFUSED, b"no")
    assert answer.result(10) == (Verdict.REFUSED, b"no")


def test_a_late_answer_is_not_taken_for_another(launcher_of_ranks: Launcher) -> None:
    """Ranks give up a round. Later messages about that round are not taken for answers to their next requests."""
    ranks = [launcher_of_ranks.rank(number) for number in range(3)]
    for number in range(3):  # each finds the others missing, because they have left the round
        with pytest.raises(Timeout) as caught:
            ranks[number].gather("x", [0, 1, 2], b"value", 0.3)
        assert set(caught.value.missing) == {0, 1, 2} - {number}
    launcher_of_ranks.orders.send(b"\x02")  # an answer about the old round would say that rank 2 is lost
    assert ranks[0].newcomers(HANG_S) == []
    assert ranks[0].gather("y", [0], b"me") == [b"me"]


def test_answers_have_the_numbers_of_their_requests(launcher_of_ranks: Launcher) -> None:
    rank = launcher_of_ranks.rank(0)
    late = rank._ask({"join": "who"})  # its answer is never read
    assert rank.gather("x", [0], b"value") == [b"value"] and late == 1
    assert rank.newcomers(HANG_S) == []


def test_a_vote(launcher_of_ranks: Launcher, threads: ThreadPoolExecutor) -> None:
    ranks = [launcher_of_ranks.rank(number) for number in range(3)]
    asked = [threads.submit(ranks[number].vote, "a", [0, 1, 2], True, 30.0) for number in (0, 1)]
    assert ranks[2].vote("a", [0, 1, 2], True, 30.0)
    assert [one.result(10) for one in asked] == [True, True]
    assert not ranks[0].vote("b", [0, 1, 2], True, 0.3)  # the others do not come in time
    assert not ranks[1].vote("b", [0, 1, 2], True, 30.0)
    waits = threads.submit(ranks[0].vote, "c", [0, 1], True, 30.0)
    launcher_of_ranks.orders.send(b"\x01")
    assert not waits.result(10)
