"""Errors of ranks that wait for a rank which has left because of the loss of another one."""

from __future__ import annotations

import pytest
import torch

import sordino.torch as hvd
from sordino._core import SimNetwork, sim_worlds
from sordino.errors import PeerLost
from sordino.runtime.context import Context, use


def lost_by_a_receive(context: Context, source: int) -> PeerLost:
    """Return the error of a receive from a rank that has left or will leave."""
    with use(context), pytest.raises(PeerLost) as raised:
        hvd.recv(torch.zeros(1), source)
    return raised.value


@pytest.mark.parametrize("end", ["shutdown", "abort"])
@pytest.mark.parametrize("named", [None, 1, 7])
def test_the_rank_that_left_first_is_named(end: str, named: int | None) -> None:
    """Rank 1 leaves, so rank 2 leaves too. Rank 0 waits only for rank 2. Ranks that do not exist are not named."""
    contexts = [Context(world) for world in sim_worlds(SimNetwork([0, 1, 1]))]
    contexts[1].shutdown()
    error: Exception = lost_by_a_receive(contexts[2], 1)
    if named != 1:
        error = PeerLost("made by the program", [named]) if named else ValueError("made by the program")
    getattr(contexts[2], end)(error)
    reported = lost_by_a_receive(contexts[0], 2)
    assert reported.ranks == ((1,) if named == 1 else (2,)), reported
    assert "rank 2" in str(reported)
    assert str(error) in str(reported)
    for context in (contexts[2], contexts[0]):
        context.shutdown()
