"""Votes at the launcher: all ranks get one decision, whichever rank is lost."""

from __future__ import annotations

import itertools

import pytest

from sordino.rendezvous.votes import Votes

RANKS = (0, 2, 5)


class Ballot:
    """A vote of `RANKS`, with the decisions that each rank has received."""

    def __init__(self) -> None:
        self.votes = Votes()
        self.gone: set[int] = set()
        self.told: dict[int, list[bool]] = {rank: [] for rank in RANKS}

    def ask(self, rank: int, agrees: bool) -> None:
        self.votes.take("key", RANKS, rank, agrees, self.told[rank].append, self.gone)

    def end(self, rank: int) -> None:
        self.gone.add(rank)
        self.votes.note_ended(self.gone)


@pytest.mark.parametrize("order", list(itertools.permutations(RANKS)))
def test_all_must_agree(order: tuple[int, ...]) -> None:
    ballot = Ballot()
    for rank in order[:-1]:
        ballot.ask(rank, True)
        assert not any(ballot.told.values())
    ballot.ask(order[-1], True)
    assert list(ballot.told.values()) == [[True]] * 3
    ballot.end(order[0])
    ballot.ask(order[1], False)  # too late
    assert ballot.told[order[1]] == [True, True]


@pytest.mark.parametrize("against", RANKS)
def test_one_is_against(against: int) -> None:
    ballot = Ballot()
    for rank in RANKS:
        ballot.ask(rank, rank != against)
    assert list(ballot.told.values()) == [[False]] * 3


def test_a_rank_changes_its_mind() -> None:
    """It has waited too long. The others get the same decision, even if they agree later."""
    ballot = Ballot()
    ballot.ask(0, True)
    ballot.ask(0, False)
    assert ballot.told[0] == [False, False]
    ballot.ask(2, True)
    ballot.ask(5, True)
    assert ballot.told[2] == ballot.told[5] == [False]


@pytest.mark.parametrize("before", (True, False))
def test_a_rank_ends_before_it_has_voted(before: bool) -> None:
    ballot = Ballot()
    if before:
        ballot.end(5)
    ballot.ask(0, True)
    if not before:
        assert ballot.told[0] == []
        ballot.end(5)
    ballot.ask(2, True)
    assert ballot.told[0] == ballot.told[2] == [False]


def test_a_rank_ends_after_it_has_voted() -> None:
    ballot = Ballot()
    ballot.ask(5, True)
    ballot.end(5)
    ballot.ask(0, True)
    ballot.ask(2, True)
    assert ballot.told[0] == ballot.told[2] == [True]


def test_others_have_no_vote() -> None:
    ballot = Ballot()
    with pytest.raises(ValueError, match="has no vote on"):
        ballot.votes.take("key", RANKS, 1, True, ballot.told[0].append, ballot.gone)
