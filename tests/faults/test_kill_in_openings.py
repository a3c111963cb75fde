"""A rank is lost while all ranks meet before their first step. For some of the others, the meeting has succeeded."""

from __future__ import annotations

import pytest
from crew import Crew, Member, metric

from sordino.algorithms import ADPSGD, Algorithm, ScheduledPull


def forget_the_meeting(member: Member) -> None:
    """Put a rank in the state in which its part of the meeting has failed."""
    strategy = member.optimizer._strategy
    if isinstance(strategy.algorithm, ADPSGD):
        strategy._opened = False
    else:
        strategy._began = None


@pytest.mark.parametrize("algorithm", [ScheduledPull(), ADPSGD(overlap=0)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("late", [0, 2])
def test_all_meet_again_if_some_have_met(algorithm: Algorithm, late: int) -> None:
    crew = Crew(4, algorithm)
    try:
        crew.all(Member.step)
        crew.network.kill(3)
        crew.living.pop()

        def go_on(member: Member) -> tuple[int, int, float]:
            if member.identity == late:
                forget_the_meeting(member)
            member.step()
            answer = metric(member)
            member.step()
            return answer

        assert set(crew.all(go_on).values()) == {(3, 3, 3.0)}
    finally:
        crew.end()
