"""Schedules of all-reduces: every member gets the values of all, each exactly once, in as few rounds as possible."""

from __future__ import annotations

import math

import pytest

from sordino._core import all_reduce_rounds, all_reduce_teams
from sordino.errors import UsageError


@pytest.mark.parametrize("size", range(1, 18))
def test_doubling_combines_all_values_once(size: int) -> None:
    everything = set(range(size))
    known = [{member} for member in range(size)]
    rounds = all_reduce_rounds(size, small=True)
    for one in rounds:
        assert one.share == 1 and one.repeats == 1
        before = list(known)
        assert len(set(one.targets)) == len(one.targets)
        for source, target in zip(one.sources, one.targets):
            if before[source] == everything:
                known[target] = everything  # the result replaces the member's previous values
            else:
                assert not before[source] & known[target], "a value is counted twice"
                known[target] = known[target] | before[source]
    assert all(one == everything for one in known)
    power = 2 ** int(math.log2(size))
    assert len(rounds) == int(math.log2(size)) + 2 * (size > power)


@pytest.mark.parametrize("size", range(3, 12))
def test_a_ring_sends_as_little_as_there_can_be(size: int) -> None:
    (ring,) = all_reduce_rounds(size, small=False)
    assert ring.repeats * ring.share == pytest.approx(2 * (size - 1) / size)
    assert dict(zip(ring.sources, ring.targets)) == {place: (place + 1) % size for place in range(size)}


def test_teams_have_one_rank_of_every_node() -> None:
    nodes = [[0, 1, 4], [2, 3]]
    assert all_reduce_teams(nodes, small=False) == [[0, 2], [1, 3]]
    assert all_reduce_teams(nodes, small=True) == [[0, 2]]
    with pytest.raises(UsageError, match="at least one node"):
        all_reduce_teams([], small=True)
    with pytest.raises(UsageError, match="at least one"):
        all_reduce_rounds(0, small=True)
