"""Residuals that another number of ranks loads: the values owed to the mean, against a float64 reference."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sordino.codecs import Codec, Int8, Sign, TopK, TwoBit
from sordino.errors import UsageError
from sordino.runtime.exchange.compressed_mean import CompressedMean
from sordino.runtime.exchange.residuals import Feedback, Sender
from sordino.runtime.exchange.saved_residuals import BY_RANK, WAS, Piece, renumbered

COUNTS = {"first": 100, "second": 333}
ALL = [Piece("first", 0, 100, 0, 100), Piece("second", 0, 333, 100, 333)]
TURNED = [Piece("second", 0, 333, 0, 333), Piece("first", 0, 100, 333, 100)]


class Idle:
    """Transfers of some ranks that send nothing."""

    def __init__(self, size: int) -> None:
        self.size, self.place = size, 0


class Rank:
    """A rank with one mean of all parameters."""

    def __init__(self, rank: int, size: int, codec: Codec, pieces: list[Piece], sums: bool = False) -> None:
        self.sender = Sender(rank, tuple(range(size)), size, codec, sums)
        self.feedback = Feedback(self.sender, "values")
        self.pieces, self.mean = pieces, CompressedMean(sum(COUNTS.values()), codec, "values", Idle(size))  # type: ignore[arg-type]

    def draw(self) -> dict[str, Any]:
        """Return a state with random residuals."""
        generator = torch.Generator().manual_seed(self.sender.rank)
        for residual in self.mean.residuals:
            residual.copy_(torch.randn(residual.shape, generator=generator))
        self.feedback.attach(self.pieces, self.mean)
        return self.feedback.state()

    def load(self, state: dict[str, Any]) -> Rank:
        self.feedback.load(state, COUNTS)
        self.feedback.attach(self.pieces, self.mean)
        return self


def owed(ranks: Iterable[Rank], among: int) -> dict[str, torch.Tensor]:
    """Return the values that these ranks owe to the mean of `among` ranks, by the definition of the encoded mean."""
    total = {name: torch.zeros(count, dtype=torch.float64) for name, count in COUNTS.items()}
    for one in ranks:
        own, *shard = (residual.double() for residual in one.mean.residuals)
        own = own / among
        for part in shard:
            own[one.sender.rank * len(part) : (one.sender.rank + 1) * len(part)] += part
        for piece in one.pieces:
            total[piece.name] += own[piece.at : piece.at + piece.end]
    return total


def united(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {BY_RANK: {rank: own for state in states for rank, own in state[BY_RANK].items()}}


@pytest.mark.parametrize("codec", (Sign(32), TwoBit(64), TopK(0.1, 32)), ids=str)
@pytest.mark.parametrize("after", (2, 3, 4, 7))
@pytest.mark.parametrize("pieces", (ALL, TURNED), ids=("same", "turned"))
def test_another_number_of_ranks_owes_the_same(codec: Codec, after: int, pieces: list[Piece]) -> None:
    """Loading a state with the residuals of all ranks loses none of them, and does not warn."""
    before = [Rank(rank, 4, codec, ALL) for rank in range(4)]
    state = united([rank.draw() for rank in before])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = [Rank(rank, after, codec, pieces).load(state) for rank in range(after)]
    for name, wanted in owed(before, 4).items():
        torch.testing.assert_close(owed(now, after)[name], wanted, atol=1e-5, rtol=1e-5)
    if after == 4 and pieces is ALL:
        assert all(
            torch.equal(mine, then)
            for one, other in zip(now, before)
            for mine, then in zip(one.mean.residuals, other.mean.residuals)
        )


@pytest.mark.parametrize("codec", (Sign(32), TopK(0.1, 32)), ids=str)
def test_a_state_that_is_saved_again_before_it_is_used(codec: Codec) -> None:
    """A rank that has the residuals of two ranks owes both."""
    before = [Rank(rank, 4, codec, ALL) for rank in range(4)]
    state = united([rank.draw() for rank in before])
    now = []
    for rank in range(2):
        between = Rank(rank, 2, codec, ALL)
        between.feedback.load(state, COUNTS)
        now.append(Rank(rank, 2, codec, ALL).load(between.feedback.state()))
    for name, wanted in owed(before, 4).items():
        torch.testing.assert_close(owed(now, 2)[name], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("after", (2, 5))
def test_each_rank_loads_its_own_state(after: int) -> None:
    """Residuals of ranks that are gone are lost, and the ranks that would inherit them warn. New ranks start from 0."""
    before = [Rank(rank, 4, Sign(32), ALL) for rank in range(4)]
    states = [rank.draw() for rank in before]
    now = []
    for rank in range(after):
        expected = pytest.warns(RuntimeWarning, match=f"not those of rank {rank + 2}") if after == 2 else nullcontext()
        with expected:
            now.append(Rank(rank, after, Sign(32), ALL).load(states[min(rank, 3)] if rank < 4 else united(states)))
    for name, wanted in owed(before[:after], 4).items():
        torch.testing.assert_close(owed(now, after)[name], wanted, atol=1e-5, rtol=1e-5)
    if after > 4:
        assert not any(residual.any() for residual in now[4].mean.residuals)


@pytest.mark.parametrize(
    ("codec", "sums"), ((TopK(0.1, 32, contributors=True), False), (Sign(32), True)), ids=("contributors", "sums")
)
def test_values_that_do_not_depend_on_the_number_of_ranks(codec: Codec, sums: bool) -> None:
    """With a sum, and with a mean over the ranks that have sent a value, residuals keep their size."""
    before = [Rank(rank, 2, codec, ALL, sums) for rank in range(2)]
    state = united([rank.draw() for rank in before])
    now = [Rank(rank, 4, codec, ALL, sums).load(state) for rank in range(4)]
    for name, wanted in owed(before, 2).items():
        torch.testing.assert_close(4 * owed(now, 4)[name], 2 * wanted, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_dropped_and_the_rest_is_kept() -> None:
    before = Rank(1, 2, Sign(32), ALL)
    state = before.draw()
    with pytest.warns(RuntimeWarning, match="no parameters of these names and sizes: second"):
        one = Rank(1, 2, Sign(32), ALL)
        one.feedback.load(state, {"first": 100, "second": 334})
    one.feedback.attach(one.pieces, one.mean)
    wanted = owed([before], 2)
    torch.testing.assert_close(owed([one], 2)["first"], wanted["first"], atol=1e-6, rtol=1e-6)
    assert not owed([one], 2)["second"].any()
    for other in (Rank(1, 2, Int8(32), ALL), Rank(0, 1, Sign(32), ALL)):
        with pytest.warns(RuntimeWarning, match="ranks keeps none"):
            other.load(state)
        assert other.feedback.state() == {} or not any(residual.any() for residual in other.mean.residuals)


def test_residuals_that_no_mean_has_taken_are_saved_again() -> None:
    state = Rank(1, 3, TwoBit(32), ALL).draw()
    one = Rank(1, 3, TwoBit(32), ALL)
    one.feedback.load(state, COUNTS)
    (again,) = one.feedback.state()[BY_RANK].values()
    (first,) = state[BY_RANK].values()
    for mine, then in zip(again["means"][0]["residuals"], first["means"][0]["residuals"]):
        assert torch.equal(mine, then)
    with pytest.warns(RuntimeWarning, match="100 residuals are lost, because shards are other ones"):
        one.feedback.drop_rest({"first"}, "shards are other ones")
    one.feedback.attach(one.pieces, one.mean)
    assert not owed([one], 3)["first"].any() and owed([one], 3)["second"].all()


def test_a_rank_with_another_number_has_its_own_residuals_only() -> None:
    own, other = {"ranks": [0, 1, 2]}, {"ranks": [0, 1, 2], "size": 3}
    assert renumbered({"a": {BY_RANK: {2: own}}, "b": 5}, 2, 1) == {"a": {BY_RANK: {1: {WAS: 2, **own}}}, "b": 5}
    for state in ({BY_RANK: {0: other}}, {BY_RANK: {0: other, 2: own}}):  # loaded, and not in use yet
        assert renumbered(state, 2, 1) == state
    assert renumbered({BY_RANK: {2: own}}, 2, 2) == {BY_RANK: {2: own}}


def test_pieces_of_parameters() -> None:
    """Residuals of slices of parameters, as shards have them, are loaded into other slices."""
    codec, half = Sign(32), [Piece("second", 0, 200, 0, 333)]
    one = Rank(0, 2, codec, half)
    state = one.draw()
    other = Rank(0, 2, codec, [Piece("second", 150, 333, 40, 333)]).load(state)
    found = other.mean.residuals[0]
    sent = one.mean.residuals[0].clone()
    sent[: len(one.mean.residuals[1])] += 2 * one.mean.residuals[1]
    torch.testing.assert_close(found[40:90], sent[150:200])
    assert not found[90:].any() and not found[:40].any()


@pytest.mark.parametrize("state", ({"residuals": []}, {BY_RANK: {0: {"means": []}}}, {BY_RANK: {5: None}}))
def test_other_states_are_refused(state: dict[str, Any]) -> None:
    one = Rank(0, 2, Sign(32), ALL)
    one.draw()
    before = [residual.clone() for residual in one.mean.residuals]
    with pytest.raises(UsageError, match="no residuals of error feedback"):
        one.feedback.load(state, COUNTS)
    assert all(map(torch.equal, before, one.mean.residuals))
