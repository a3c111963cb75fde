"""Transfers that share links: against closed forms, and against limits of any fair division."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.algorithms import ADPSGD, ScheduledPull
from sordino.simulate.averaging import Averaging
from sordino.simulate.job import Job, LinkSharing, Outcome
from sordino.simulate.links import Links
from sordino.simulate.pulling import Pulling
from sordino.simulate.record import Span
from sordino.simulate.sharing import Sharing, fair_rates

GIGABYTE = 1e9
Transfer = tuple[float, int, int, float]
"""The start, the sender, the receiver, and the bytes of a transfer."""


def carried_out(links: Links, transfers: Sequence[Transfer]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the end of each transfer, in seconds, and each worker's sent and received bytes, summed from the rates."""
    sharing, ends = Sharing(links), [math.inf] * len(transfers)
    moved = [(0.0, 0.0)] * len(links)
    waiting = sorted(range(len(transfers)), key=lambda number: transfers[number][0])
    now, end = 0.0, None
    while waiting or sharing.flows:
        begins = transfers[waiting[0]][0] if waiting else math.inf
        then = min(begins, math.inf if end is None else end)
        for flow in sharing.flows:
            (sender, to), count = flow.ends, flow.rate * (then - now) / 8e-9
            moved[sender] = moved[sender][0] + count, moved[sender][1]
            moved[to] = moved[to][0], moved[to][1] + count
        now = then
        for call, (number,) in sharing.ended(now):
            call(number, now)
        while waiting and transfers[waiting[0]][0] == now:
            number = waiting.pop(0)
            sharing.begin(now, *transfers[number][1:], (ends.__setitem__, (number,)))
        end = sharing.divide(now)
    return ends, moved


# ---- closed forms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfers", "ends"),
    [
        ([(0.0, 0, 1, GIGABYTE)], [8.0]),
        ([(0.0, 0, 1, GIGABYTE), (0.0, 0, 2, GIGABYTE)], [16.0, 16.0]),  # same sender: twice as long
        ([(0.0, 1, 0, GIGABYTE), (0.0, 2, 0, GIGABYTE)], [16.0, 16.0]),  # same receiver
        ([(0.0, 0, 1, GIGABYTE), (0.0, 1, 0, GIGABYTE)], [8.0, 8.0]),  # both directions at once
        ([(0.0, 0, 1, GIGABYTE), (0.0, 2, 3, GIGABYTE)], [8.0, 8.0]),  # no common link
        # The first two are half done after 8 s. Then there are three, which need 12 s for the other halves; by then the
        # third is half done.
        ([(0.0, 0, 1, GIGABYTE), (0.0, 0, 2, GIGABYTE), (8.0, 0, 3, GIGABYTE)], [20.0, 20.0, 24.0]),
        ([(0.0, 0, 1, GIGABYTE), (4.0, 0, 2, GIGABYTE)], [12.0, 16.0]),  # the second begins halfway
        ([(0.0, 0, 1, GIGABYTE), (0.0, 0, 2, GIGABYTE / 4)], [10.0, 4.0]),  # an ended transfer frees its share
    ],
)
def test_equal_shares_of_one_link(transfers: list[Transfer], ends: list[float]) -> None:
    assert carried_out(Links([1.0] * 4, 0.0), transfers)[0] == pytest.approx(ends, abs=1e-9)


def test_what_a_slower_end_leaves_is_the_others() -> None:
    """Worker 0 sends at 10 Gbps to a receiver with 1 Gbps and to one with 10 Gbps: the rates are 1 and 9 Gbps."""
    assert fair_rates([(0, 1), (0, 2)], [10.0, 1.0, 10.0]) == pytest.approx([1.0, 9.0])
    assert fair_rates([(0, 1), (0, 2), (3, 2)], [6.0, 1.0, 8.0, 10.0]) == pytest.approx([1.0, 4.0, 4.0])
    assert fair_rates([(0, 1)], [math.inf, math.inf]) == [math.inf]
    assert fair_rates([(0, 1), (0, 2), (3, 1)], [math.inf, math.inf, 2.0, math.inf]) == [math.inf, 2.0, math.inf]


def test_whoever_is_gone_leaves_its_share() -> None:
    sharing = Sharing(Links([1.0] * 3, 0.0))
    for to in (1, 2):
        sharing.begin(0.0, 0, to, GIGABYTE, (list, ()))
    assert sharing.divide(0.0) == pytest.approx(16.0)
    sharing.drop(2)
    assert sharing.divide(8.0) == pytest.approx(12.0)


# ---- properties ------------------------------------------------------------------------------------------------------

workers = 5
rates = st.lists(st.sampled_from([0.1, 1.0, 3.0, 10.0]), min_size=workers, max_size=workers)
ways = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1)).filter(lambda way: way[0] != way[1])
begins = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0.0, 2.0))
some = st.lists(st.tuples(begins, ways, st.floats(1.0, 1e9)), min_size=1, max_size=12)


@given(rates, st.lists(ways, min_size=1, max_size=12))
def test_no_link_carries_more_than_it_can_and_each_transfer_has_a_full_link(
    gbps: list[float], ends: list[tuple[int, int]]
) -> None:
    found = fair_rates(ends, gbps)
    used = {(way, worker): 0.0 for way in (0, 1) for worker in range(workers)}
    for both, rate in zip(ends, found, strict=True):
        for way in (0, 1):
            used[way, both[way]] += rate
    assert all(rate <= gbps[worker] * (1 + 1e-12) for (_, worker), rate in used.items())
    for both, rate in zip(ends, found, strict=True):  # a higher rate would take from an equal or lower one
        full = [way for way in (0, 1) if used[way, both[way]] >= gbps[both[way]] * (1 - 1e-12)]
        assert any(
            all(rate >= other * (1 - 1e-12) for one, other in zip(ends, found, strict=True) if one[way] == both[way])
            for way in full
        )


@given(rates, some)
def test_no_byte_is_lost_and_none_is_faster_than_its_link(
    gbps: list[float], drawn: list[tuple[float, tuple[int, int], float]]
) -> None:
    links = Links(gbps, 0.0)
    transfers = [(begin, *way, count) for begin, way, count in drawn]
    ends, moved = carried_out(links, transfers)
    for (begin, sender, to, count), end in zip(transfers, ends, strict=True):
        assert end - begin >= links.seconds(sender, to, count) - 1e-9
    for worker in range(workers):
        for way in (0, 1):
            mine = [one for one in zip(transfers, ends, strict=True) if one[0][1 + way] == worker]
            total = sum(one[3] for one, _ in mine)
            assert moved[worker][way] == pytest.approx(total, rel=1e-9, abs=10.0)  # an end is exact to 15 ps
            if mine:
                span = max(end for _, end in mine) - min(one[0] for one, _ in mine)
                assert total <= gbps[worker] / 8e-9 * span + 10.0


# ---- worlds ----------------------------------------------------------------------------------------------------------


def run(algorithm: ScheduledPull | ADPSGD, sharing: LinkSharing, size: int = 8) -> Outcome:
    kind = Pulling if isinstance(algorithm, ScheduledPull) else Averaging
    job = Job(
        algorithm, size, Links([1.0] * size, 5e-3), np.full(size, 10e-3), 3.5 * 2**20, steps=160, data="none",
        points=1, spans_until=1e9, sharing=sharing,
    )  # fmt: skip
    return kind(job, lambda _: None).run()


def transfers_of(outcome: Outcome) -> list[Span]:
    return [span for span in outcome.record.spans if span.activity == "transfer"]


def test_pulls_that_meet_at_a_peer_take_longer_and_others_do_not() -> None:
    """With naive overlap all workers pull at once. k pulls from one peer take k times as long, plus the latency."""
    alone = 8e-9 * 3.5 * 2**20
    spans = transfers_of(run(ScheduledPull(overlap="naive"), "fair"))
    first = [span for span in spans if span.begin == 0.0]
    assert len(first) == 8
    for span in first:
        met = sum(one.peer == span.peer for one in first)
        assert span.end - span.begin == pytest.approx(5e-3 + met * alone, abs=1e-9)
    assert any(sum(one.peer == span.peer for one in first) > 1 for span in first)
    without = transfers_of(run(ScheduledPull(overlap="naive"), "none"))
    assert {span.end - span.begin for span in without} == {Links([1.0] * 8, 5e-3).seconds(0, 1, 3.5 * 2**20)}


@pytest.mark.parametrize("schedule", ["manager", "autonomous"])
def test_scheduled_pulls_never_meet_so_sharing_costs_them_nothing(schedule: str) -> None:
    algorithm = ScheduledPull(schedule=schedule)  # type: ignore[arg-type]
    alone = Links([1.0] * 8, 5e-3).seconds(0, 1, 3.5 * 2**20)
    for span in transfers_of(run(algorithm, "fair")):
        assert span.end - span.begin == pytest.approx(alone, abs=1e-9)


def test_what_begins_when_another_ends_is_not_over() -> None:
    sharing = Sharing(Links([1.0] * 3, 0.0))
    sharing.begin(0.0, 0, 1, GIGABYTE, (list, ()))
    assert sharing.divide(0.0) == 8.0
    sharing.begin(8.0, 0, 2, GIGABYTE, (dict, ()))
    assert sharing.ended(8.0) == [(list, ())]
    assert sharing.divide(8.0) == 16.0


def test_no_overlap_waits_longer_where_links_are_shared() -> None:
    fair, free = (run(ScheduledPull(overlap="none"), sharing).record for sharing in ("fair", "none"))
    assert fair.waiting.mean() > 1.2 * free.waiting.mean()
    assert (fair.pulls == free.pulls).all()


def test_pairs_share_nothing_and_deaths_stop_nobody() -> None:
    fair, free = (run(ADPSGD(interval=4), sharing, size=2) for sharing in ("fair", "none"))
    assert fair.record.spans == free.record.spans and fair.final == free.final
    job = Job(
        ScheduledPull(overlap="none"), 6, Links([1.0] * 6, 5e-3), np.full(6, 10e-3), 3.5 * 2**20, seconds=5.0,
        data="none", points=1, sharing="fair", kills=((1, 0.17), (2, 1.0)),
    )  # fmt: skip
    record = Pulling(job, lambda _: None).run().record
    assert all(record.pulls[worker] > 15 for worker in (0, 3, 4, 5))
