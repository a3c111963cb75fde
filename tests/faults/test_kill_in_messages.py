"""A rank is killed while ranks send and receive messages; ranks are threads. Calls that need it raise PeerLost, and the
remaining ranks meet and exchange messages again."""

from __future__ import annotations

import time

import pytest
import torch
from crew import Crew, MakeCrew, Member, metric

import sordino.torch as hvd
from sordino.errors import PeerLost

COUNTS = (100, 50_000)  # elements: a message that is sent at once, and one that waits for its receive


@pytest.fixture(params=[0, 1, 2], ids=["one node", "nodes of one", "nodes of two"])
def crew(request: pytest.FixtureRequest, crew_of: MakeCrew) -> Crew:
    return crew_of(4, per_node=request.param)


def exchange(member: Member, tag: int) -> None:
    """Send around a ring, and check the values."""
    ranks, rank = member.context.size, member.context.rank
    for count in COUNTS:
        handle = hvd.send_async(torch.full((count,), float(rank)), (rank + 1) % ranks, tag)
        got = torch.zeros(count)
        source = hvd.recv(got, None if tag % 2 else (rank - 1) % ranks, tag)
        hvd.synchronize(handle)
        assert source == (rank - 1) % ranks
        assert torch.equal(got, torch.full((count,), float(source)))


@pytest.mark.parametrize("delay_us", [0, 300, 1000, 3000])
def test_messages_after_a_loss(crew: Crew, delay_us: int) -> None:
    def work(member: Member) -> str:
        # Each turn has its own tag, since ranks may notice the loss in different turns.
        try:
            for turn in range(100_000):
                exchange(member, turn)
        except PeerLost:
            return "lost"
        return "not lost"

    crew.all(metric)
    crew.order(work)
    time.sleep(0.02 + delay_us * 1e-6)
    crew.network.kill(3)
    assert set(crew.settle().values()) == {"lost"}
    crew.all(lambda member: exchange(member, 0))
    crew.all(lambda member: exchange(member, 1))
    assert set(crew.all(metric).values()) == {(3, 3, 3.0)}


def test_calls_that_wait_for_a_killed_rank(crew: Crew) -> None:
    """PeerLost ends receives from the lost rank, from any rank, and from a rank that sends nothing, and a send."""

    def begin(member: Member) -> None:
        member.got = torch.full((5,), 7.0)  # type: ignore[attr-defined]
        member.handles = [  # type: ignore[attr-defined]
            hvd.recv_async(member.got, 3),  # type: ignore[attr-defined]
            hvd.recv_async(torch.zeros(5), tag=1),
            hvd.recv_async(torch.zeros(5), (member.identity + 1) % 3, tag=2),
            hvd.send_async(torch.zeros(200_000), 3, tag=3),
        ]

    def end(member: Member) -> tuple[str, ...]:
        texts = []
        for handle in member.handles:  # type: ignore[attr-defined]
            try:
                hvd.synchronize(handle)
            except PeerLost as error:
                texts.append(str(error))
        assert member.got.tolist() == [7.0] * 5  # type: ignore[attr-defined]
        return tuple("is lost" in text for text in texts)  # type: ignore[return-value]

    crew.all(metric)
    crew.all(begin)
    crew.network.kill(3)
    crew.order(end)
    assert set(crew.settle().values()) == {(True,) * 4}
