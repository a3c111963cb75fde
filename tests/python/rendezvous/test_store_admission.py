"""Join requests at a store: votes have one outcome, newcomers that have gone are not invited, and values of
strangers change nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
from launched import eventually
from pace import HANG_S
from torch.distributed import HashStore

from sordino.errors import TransportError, UsageError
from sordino.rendezvous import find_start, store_admission
from sordino.rendezvous.environment import launched_rank
from sordino.rendezvous.join_requests import Admission, Verdict
from sordino.rendezvous.store import StoreRendezvous
from sordino.rendezvous.store_admission import Job, StoreAdmission, latest_job

TOKEN = b"secret"
Admissions = list[StoreAdmission]


class Store(HashStore):
    """A HashStore with a request that only other stores have, for one thread at a time."""

    def compare_set(self, name: str, expected: str, value: str) -> bytes:
        if expected == "" and not self.check([name]):
            self.set(name, value)
        return bytes(self.get(name))


@pytest.fixture
def admissions() -> Iterator[list[StoreAdmission]]:
    store = Store()
    made = [StoreAdmission(store, "sordino/x", rank, TOKEN, 60.0, 60.0) for rank in range(3)]
    yield made
    for admission in made:
        admission.end(False)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_only_some_rendezvous_let_processes_join(admissions: Admissions) -> None:
    assert isinstance(admissions[0], Admission)
    assert not isinstance(StoreRendezvous(Store(), "x", 0, b"", 1, 1), Admission)


# ---- votes -----------------------------------------------------------------------------------------------------------


def test_all_agree(admissions: Admissions, threads: ThreadPoolExecutor) -> None:
    votes = [threads.submit(admission.vote, "k", [0, 1, 2], True, HANG_S) for admission in admissions]
    assert [vote.result() for vote in votes] == [True] * 3


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_one_does_not_agree(admissions: Admissions, threads: ThreadPoolExecutor, order: tuple[int, ...]) -> None:
    votes = [threads.submit(admissions[rank].vote, "k", [0, 1, 2], rank != 1, HANG_S) for rank in order]
    assert [vote.result() for vote in votes] == [False] * 3


def test_who_comes_too_late_gets_the_same_decision(admissions: Admissions, threads: ThreadPoolExecutor) -> None:
    votes = [threads.submit(admissions[rank].vote, "k", [0, 1, 2], True, 0.2) for rank in (0, 2)]
    assert [vote.result() for vote in votes] == [False] * 2
    assert not admissions[1].vote("k", [0, 1, 2], True, HANG_S)


def test_a_stranger_cannot_vote(admissions: Admissions) -> None:
    """It can neither vote for a rank, nor raise the count, nor write the decision."""
    stranger = StoreAdmission(admissions[0]._store, "sordino/x", 1, b"guessed", 60.0, 60.0)
    stranger._write("vote/k/1", "yes")
    admissions[0]._store.add("sordino/x/vote/k/count", 2)
    with pytest.raises(TransportError, match="vote/k/1 in the store is not signed"):
        admissions[0].vote("k", [0, 1], True, HANG_S)
    stranger._decide("another", "yes")
    with pytest.raises(TransportError, match="vote/another in the store is not signed"):
        admissions[0].vote("another", [0, 1], True, HANG_S)


def test_a_count_that_is_too_high_decides_nothing(admissions: Admissions) -> None:
    admissions[0]._store.add("sordino/x/vote/k/count", 2)
    assert not admissions[0].vote("k", [0, 1, 2], True, 0.1)


# ---- newcomers -------------------------------------------------------------------------------------------------------


def test_the_first_rank_answers(admissions: Admissions, threads: ThreadPoolExecutor) -> None:
    assert not admissions[0].waits() and admissions[0].newcomers() == []
    answers = [threads.submit(admissions[rank].ask_to_join, b"process %d" % rank, 60.0) for rank in (1, 2)]
    assert eventually(lambda: len(admissions[0].newcomers()) == 2, HANG_S)
    assert admissions[0].waits() and sorted(admissions[0].newcomers()) == [(1, b"process 1"), (2, b"process 2")]
    admissions[0].answer(2, Verdict.REFUSED, b"another model")
    assert answers[1].result(HANG_S) == (Verdict.REFUSED, b"another model")
    assert admissions[0].newcomers() == [(1, b"process 1")]
    admissions[0].answer(1, Verdict.INVITED, b"the plan")
    assert answers[0].result(HANG_S) == (Verdict.INVITED, b"the plan")
    assert not admissions[0].waits()
    admissions[0].answer(1, Verdict.INVITED, b"again")  # no process waits
    again = threads.submit(admissions[1].ask_to_join, b"again", 60.0)  # a vote has failed
    assert eventually(lambda: admissions[0].newcomers() == [(1, b"again")], HANG_S)
    admissions[0].answer(1, Verdict.REFUSED, b"")
    assert again.result(HANG_S) == (Verdict.REFUSED, b"")


def test_who_has_asked_and_gone_is_not_invited(admissions: Admissions) -> None:
    number = admissions[1]._store.add("sordino/x/requests", 1) - 1
    admissions[1]._write(f"request/{number}", json.dumps([1, "gone"]))
    admissions[1]._store.add(f"sordino/x/request/{number}/beat", 1)  # all before the first rank looks
    admissions[0].waits()
    time.sleep(1)
    assert not admissions[0].waits()


def test_a_stranger_that_asks_is_refused(admissions: Admissions, threads: ThreadPoolExecutor) -> None:
    stranger = StoreAdmission(admissions[0]._store, "sordino/x", 1, b"guessed", 60.0, 60.0)
    answer = threads.submit(stranger.ask_to_join, b"hello", 60.0)
    assert eventually(admissions[0].waits, HANG_S)
    assert admissions[0].newcomers() == []
    with pytest.raises(TransportError, match="request/0/verdict in the store is not signed"):
        answer.result(HANG_S)
    assert not admissions[0].waits()


def test_who_waits_is_told_that_the_job_is_over(
    admissions: Admissions, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_admission, "_STALE_S", 0.5)
    answer = threads.submit(admissions[2].ask_to_join, b"", 60.0)
    admissions[0].end(True)
    with pytest.raises(TransportError, match="process 2 has asked to join a job that has ended"):
        answer.result(HANG_S)
    admissions[0].begin(2, True)  # the same processes begin again
    assert admissions[0]._read("over") == "no"


def test_a_job_is_not_over_when_its_first_rank_has_left(admissions: Admissions, threads: ThreadPoolExecutor) -> None:
    """The next first rank shows that the job runs."""
    admissions[0].end(True)
    answer = threads.submit(admissions[2].ask_to_join, b"", 60.0)
    assert eventually(lambda: admissions[1].newcomers() == [(2, b"")], HANG_S)
    assert admissions[1]._read("over") == "no"
    admissions[1].answer(2, Verdict.INVITED, b"")
    assert answer.result(HANG_S) == (Verdict.INVITED, b"")


def test_who_waits_for_a_job_without_ranks_gets_an_error() -> None:
    """For example, all pods come back to a store that has survived them."""
    admission = StoreAdmission(Store(), "sordino/x", 4, TOKEN, 0.3, 60.0)
    with pytest.raises(TransportError, match=r"of which no rank has answered for 0.3 s \(SORDINO_TIMEOUT_S\)"):
        admission.ask_to_join(b"", 60.0)


def test_a_newcomer_that_was_stopped_asks_again(
    admissions: Admissions, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, now = time.monotonic, [0.0]
    answer = threads.submit(admissions[2].ask_to_join, b"", 60.0)
    assert eventually(lambda: admissions[0].newcomers() == [(2, b"")], HANG_S)
    monkeypatch.setattr(store_admission.time, "monotonic", lambda: clock() + now[0])
    now[0] = 10.0
    assert eventually(lambda: int(admissions[0]._store.add("sordino/x/requests", 0)) == 2, HANG_S)
    assert eventually(lambda: admissions[0].newcomers() == [(2, b"")] and admissions[0]._request_of[2] == 1, HANG_S)
    admissions[0].answer(2, Verdict.REFUSED, b"")
    assert answer.result(HANG_S) == (Verdict.REFUSED, b"")


def test_only_the_latest_request_of_a_newcomer_counts(admissions: Admissions, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that was stopped for 3 s asks again before its first request counts as gone."""
    monkeypatch.setattr(StoreAdmission, "_look", lambda _: None)
    admissions[0].waits()
    admissions[0]._waiting = [admissions[2]._new_request(b"before"), admissions[2]._new_request(b"after")]
    admissions[0]._seen = time.monotonic()
    assert admissions[0].newcomers() == [(2, b"after")]
    admissions[0].answer(2, Verdict.INVITED, b"")
    assert admissions[2]._read("request/1/verdict") == "invited " and not admissions[0].waits()


def test_requests_without_end_do_not_stop_the_first_rank(admissions: Admissions) -> None:
    admissions[0]._store.add("sordino/x/requests", 10**9)
    admissions[0].waits()
    assert eventually(lambda: int(admissions[0]._store.add("sordino/x/alive", 0)) > 3, HANG_S)


def test_numbers_are_given_once(admissions: Admissions) -> None:
    assert [admission.new_number(4) for admission in admissions] == [4, 5, 6]


# ---- starts ----------------------------------------------------------------------------------------------------------


def test_a_job_says_that_it_has_begun(admissions: Admissions) -> None:
    assert admissions[0].job() is None and latest_job(admissions[0]._store) == ""
    admissions[0].begin(3, True)
    assert admissions[1].job() == Job(3, True) and latest_job(admissions[0]._store) == "sordino/x"


def test_without_a_job_nobody_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_start, "open_store", lambda *_: Store())
    environment = {"SORDINO_NEWCOMER": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    place = launched_rank(environment, 0, "")
    assert place is not None and place.newcomer and place.address == ("node0", 1234) and not place.hosts_store
    with pytest.raises(UsageError, match="no job has begun at the store at node0:1234"):
        find_start.find_start(environment=environment)
    with pytest.raises(UsageError, match="MASTER_PORT, by which they find each other, is not set"):
        launched_rank({**environment, "MASTER_PORT": ""}, 0, "")
