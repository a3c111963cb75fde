"""Topologies: the properties that every exchange needs, and the statistics of the random topologies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino._core import (
    Dissemination,
    Exponential,
    FromOwner,
    Grouped,
    Mean,
    RandomCycle,
    RandomGroups,
    RandomPull,
    Ring,
    Roulette,
    Star,
    ToOwner,
    Topology,
)
from sordino.errors import UsageError

SIZES = (1, 2, 3, 4, 5, 8, 63, 64, 65, 66, 260)


def made(size: int) -> Iterator[Topology]:
    yield RandomCycle(size, 1)
    yield Ring(size)
    yield Exponential(size, {0: 1})
    if size > 2:
        yield Exponential(size, {0: 2, 3: 1})
    yield Dissemination(size, 2)
    yield RandomPull(size, 3, 4, min(2, max(size - 1, 1)))
    for peers in {2, 3, size} - {1}:
        if size == 1 or peers <= size:
            yield RandomGroups(size, 6, peers)
    yield Star(size, 1)
    yield ToOwner(size)
    yield ToOwner(size, workers=max(1, size - 2))
    yield Mean(size)
    yield Mean(size, workers=max(1, size - 1))
    yield FromOwner(size)
    yield FromOwner(size, workers=max(1, size - 2))
    if size <= 64:
        yield Roulette(size, 4, list((1 - np.eye(size)).ravel()))
    if size % 4 == 0:
        yield Star(size, 4)
        for leaders_only in (False, True):
            yield Grouped(RandomCycle(size // 4, 5), 4, leaders_only)


@pytest.mark.parametrize("size", SIZES)
def test_destinations_are_the_inverse_of_sources(size: int) -> None:
    for topology in made(size):
        assert topology.size == size
        for at in ((0, 0), (1, 0), (7, 3))[: 3 if size < 100 else 1]:
            pulls = {(source, rank) for rank, sources in enumerate(topology.all_sources(*at)) for source in sources}
            pushes = {(rank, to) for rank in range(size) for to in topology.destinations(*at, rank)}
            assert pulls == pushes, type(topology)
            assert all(a != b and 0 <= a < size for a, b in pulls)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_averages(size: int) -> None:
    for topology in made(size):
        columns = np.zeros(size)
        for rank in range(size):
            sources, keeps_own, scale = topology.row(3, 1, rank)
            assert len(set(sources)) == len(sources)
            assert scale * (len(sources) + keeps_own) == pytest.approx(1)
            columns[[*sources, rank] if keeps_own else sources] += scale
        if isinstance(topology, (RandomCycle, RandomGroups, Ring, Exponential, Dissemination, Roulette, Mean)):
            np.testing.assert_allclose(columns, 1)  # doubly stochastic: sums are conserved


@pytest.mark.parametrize("size", [2, 3, 5, 64, 1000, 1_000_000])
def test_everybody_sends_and_receives_once(size: int) -> None:
    topology = RandomCycle(size, 11)
    sources = np.array(topology.all_sources(5, 2)).ravel()
    np.testing.assert_array_equal(np.sort(sources), np.arange(size))
    assert not np.any(sources == np.arange(size))
    for rank in (0, size // 2, size - 1):
        (to,) = topology.destinations(5, 2, rank)
        assert sources[to] == rank


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 11, 64, 65, 101])
@pytest.mark.parametrize("peers", [2, 3, 4, 11])
def test_groups_are_of_similar_sizes_and_leave_no_worker_out(size: int, peers: int) -> None:
    if peers > size:
        return
    topology = RandomGroups(size, 11, peers)
    for turn in range(5):
        groups = {tuple(sorted([rank, *found])) for rank, found in enumerate(topology.all_sources(turn, turn % 2))}
        assert sorted(rank for group in groups for rank in group) == list(range(size))
        sizes = {len(group) for group in groups}
        assert len(groups) == size // peers and min(sizes) >= peers and max(sizes) - min(sizes) <= 1
        assert topology.is_mean_of_all == (len(groups) == 1)


def test_all_groups_are_equally_likely() -> None:
    topology = RandomGroups(6, 8, 2)
    counts = Counter(tuple(found for (found,) in topology.all_sources(turn, 0)) for turn in range(30_000))
    assert len(counts) == 15  # ways to pair 6 workers
    assert abs(chi_square(np.array(list(counts.values())), 2000)) < 5


def chi_square(counts: np.ndarray, expected: float) -> float:
    """Return the number of standard deviations by which the statistic exceeds its mean."""
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [2, 3, 5, 64, 1000])
def test_all_pairs_are_equally_likely(size: int) -> None:
    """One worker at a time is tested, as the draws of all workers in a round depend on each other."""
    topology, draws = RandomCycle(size, 42), 100_000
    for rank in {0, size // 2, size - 1}:
        drawn = Counter(topology.row(turn, turn % 3, rank)[0][0] for turn in range(draws))
        counts = np.array([drawn[other] for other in range(size) if other != rank])
        assert counts.sum() == draws
        assert size == 2 or abs(chi_square(counts, draws / (size - 1))) < 5


def test_small_worlds_draw_every_cycle_equally_often() -> None:
    topology = RandomCycle(5, 8)
    counts = Counter(tuple(map(tuple, topology.all_sources(turn, 0))) for turn in range(48_000))
    assert len(counts) == 24  # (5 - 1)! cycles
    assert abs(chi_square(np.array(list(counts.values())), 2000)) < 5


@pytest.mark.parametrize("size", [5, 100])
def test_segments_and_rounds_are_independent(size: int) -> None:
    """The peers of two segments, or of two rounds, are the same with the probability of independent draws."""
    topology = RandomCycle(size, 0)
    draws = 40_000
    for other in (lambda turn: (turn, 1), lambda turn: (turn + 1, 0)):
        same = sum(
            topology.row(turn, 0, 3 % size)[0] == topology.row(*other(turn), 3 % size)[0] for turn in range(draws)
        )
        chance = 1 / (size - 1)
        assert abs(same - draws * chance) < 5 * np.sqrt(draws * chance)


def test_seeds_matter_and_repeat() -> None:
    drawn = [RandomCycle(1000, seed).all_sources(0, 0) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]


def weights(size: int) -> st.SearchStrategy[np.ndarray]:
    entries = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0]), min_size=size * size, max_size=size * size)
    return entries.map(lambda values: np.array(values).reshape(size, size) * (1 - np.eye(size)))


@settings(deadline=None, max_examples=150)
@given(st.integers(2, 7).flatmap(weights))
def test_the_roulette_follows_its_matrix(matrix: np.ndarray) -> None:
    size = len(matrix)
    try:
        roulette = Roulette(size, 1, list(matrix.ravel()))
    except UsageError as error:
        assert "no round can follow this roulette" in str(error)
        assert not any(all(matrix[i, p[i]] > 0 for i in range(size)) for p in permutations(range(size)))
        return
    wanted = np.array(roulette.probabilities).reshape(size, size)
    np.testing.assert_allclose(wanted.sum(0), 1, atol=1e-6)
    np.testing.assert_allclose(wanted.sum(1), 1, atol=1e-6)
    assert np.all(wanted[matrix == 0] == 0)
    seen = np.zeros((size, size))
    draws = 1500
    for turn in range(draws):
        sources = [source for (source,) in roulette.all_sources(turn, 0)]
        assert sorted(sources) == list(range(size))
        seen[sources, range(size)] += 1
    assert np.all(np.abs(seen / draws - wanted) < 6 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-3)


def test_a_roulette_draws_a_peer_for_each_segment() -> None:
    roulette = Roulette(4, 1, list((1 - np.eye(4)).ravel()))
    drawn = [[roulette.all_sources(turn, segment) for segment in range(5)] for turn in range(20)]
    alike = sum(round_[segment] == round_[0] for round_ in drawn for segment in range(1, 5))
    assert 0 < alike < 40  # of 80; there are 9 ways to draw


def test_a_doubly_stochastic_roulette_is_kept() -> None:
    matrix = np.array([[0, 0.7, 0.3], [0.3, 0, 0.7], [0.7, 0.3, 0]])
    np.testing.assert_allclose(Roulette(3, 0, list(matrix.ravel())).probabilities, matrix.ravel(), atol=1e-9)


def test_what_the_sequential_roulette_cannot_draw() -> None:
    """When destinations are filled rank by rank, 0 -> 1 and 1 -> 0 leave only rank 2 itself for rank 2."""
    roulette = Roulette(3, 0, [0, 1, 1, 1, 0, 1, 1, 1, 0])
    for turn in range(300):
        assert sorted(source for (source,) in roulette.all_sources(turn, 0)) == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 64])
def test_dissemination_reaches_everybody_in_log2_rounds(size: int) -> None:
    topology, rounds = Dissemination(size, 6), (size - 1).bit_length()
    for cycle in (0, 1, 5):
        known = [{rank} for rank in range(size)]
        for turn in range(cycle * rounds, (cycle + 1) * rounds):
            known = [known[rank].union(*(known[s] for s in topology.row(turn, 0, rank)[0])) for rank in range(size)]
        assert all(len(ranks) == size for ranks in known)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 64])
def test_exponential_peers_take_their_turns(size: int) -> None:
    """Exponents continue where the previous round ended, so all are used equally often."""
    exponents = (size - 1).bit_length()
    for peers in range(1, exponents + 1):
        topology = Exponential(size, {0: peers})
        for turn in (0, 1, 2, 7, 1_000_000_007):
            far = [2 ** ((turn * peers + peer) % exponents) for peer in range(peers)]
            for rank in (0, size // 2, size - 1):
                assert topology.destinations(turn, 0, rank) == [(rank + distance) % size for distance in far]
                assert topology.row(turn, 0, rank)[0] == [(rank - distance) % size for distance in far]
    if exponents > 1:  # the present number of peers counts for all earlier rounds
        assert Exponential(size, {0: 1, 3: 2}).destinations(3, 0, 0) == [
            2 ** ((6 + peer) % exponents) for peer in range(2)
        ]


@pytest.mark.parametrize(("size", "segments", "replicas"), [(5, 2, 2), (9, 8, 1), (10, 3, 3), (6, 20, 2)])
def test_combo_asks_everybody_and_balances_nothing(size: int, segments: int, replicas: int) -> None:
    topology = RandomPull(size, 7, segments, replicas)
    most = 0
    for turn in range(30):
        for rank in range(size):
            asked = [source for s in range(segments) for source in topology.row(turn, s, rank)[0]]
            if segments * replicas >= size - 1:
                assert set(asked) == set(range(size)) - {rank}
        most = max(most, *(len(topology.destinations(turn, 0, rank)) for rank in range(size)))
    assert most > replicas


def test_wrong_arguments_are_refused() -> None:
    for make, text in (
        (lambda: RandomCycle(0, 1), "at least one worker"),
        (lambda: Exponential(8, {0: 1, 9: 4}), "peers=4"),
        (lambda: Exponential(8, {1: 1}), "must begin at round 0"),
        (lambda: RandomPull(4, 0, 1, 4), "replicas=4"),
        (lambda: RandomGroups(4, 0, 1), "peers=1: from 2 to all 4 workers"),
        (lambda: RandomGroups(4, 0, 5), "peers=5: from 2 to all 4 workers"),
        (lambda: Star(5, 2), "does not divide"),
        (lambda: Roulette(2, 0, [0, 1, 1]), "4 weights, not 3"),
        (lambda: Roulette(2, 0, [0, -1, 1, 0]), r"roulette\[0\]\[1\] is -1"),
        (lambda: Roulette(2, 0, [1, 1, 1, 0]), r"roulette\[0\]\[0\] is not zero"),
        (lambda: Roulette(200, 0, [0.0] * 40_000), "up to 128 workers"),
        (lambda: Ring(3).row(0, 0, 3), "rank 3 is not one of the 3 workers"),
    ):
        with pytest.raises(UsageError, match=text):
            make()


@pytest.mark.parametrize("kind", [Mean, ToOwner, FromOwner])
def test_those_who_only_serve_have_no_say(kind: type[Mean | ToOwner | FromOwner]) -> None:
    """The last two of 5 ranks have no values of their own."""
    topology = kind(5, workers=3)
    for segment in range(5):
        for rank in range(5):
            sources, _, _ = topology.row(0, segment, rank)
            assert set(sources) <= {0, 1, 2, segment}
    assert ToOwner(5, workers=3).row(0, 4, 4) == ([0, 1, 2], False, pytest.approx(1 / 3))
    assert FromOwner(5, workers=3).destinations(0, 4, 4) == [0, 1, 2]
    for workers in (0, 6):
        with pytest.raises(UsageError, match=f"workers={workers}: must be from 1 to the number of ranks, 5"):
            kind(5, workers=workers)
