"""Local SGD after a loss between steps: the values with which all ranks continue are known to the last digit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crew import Crew, Member, metric

from sordino.algorithms import Algorithm, LocalSGD

MakeCrew = Callable[..., Crew]


@pytest.fixture
def crew_of() -> Iterator[MakeCrew]:
    torch.set_num_threads(1)
    made: list[Crew] = []

    def make(size: int, algorithm: Algorithm) -> Crew:
        made.append(Crew([0] * size, algorithm))
        return made[-1]

    yield make
    for crew in made:
        crew.end()


def steps_of(member: Member) -> Any:
    return member.optimizer._strategy


def flat(member: Member) -> torch.Tensor:
    return torch.cat([value.flatten() for value in member.values()])


def apart(crew: Crew) -> bool:
    models = list(crew.all(flat).values())
    assert len(models) > 1, [member.ended for member in crew.members]
    return any(float((model - models[0]).abs().max()) > 1e-9 for model in models)


@pytest.mark.parametrize("aggregate", ["parameters", "gradients"])
def test_all_go_on_from_their_mean_and_begin_an_interval(crew_of: MakeCrew, aggregate: str) -> None:
    crew = crew_of(4, LocalSGD(4, aggregate=aggregate))
    for _ in range(3):
        crew.all(Member.step)
    before = crew.all(flat)
    crew.network.kill(3)
    crew.all(metric)
    mean = torch.stack([before[rank] for rank in range(3)]).mean(0)
    for model in crew.all(flat).values():
        torch.testing.assert_close(model, mean, rtol=1e-12, atol=1e-12)
    seen = []
    for _ in range(4):
        crew.all(Member.step)
        seen.append(apart(crew))
    assert seen == [True, True, True, False]


def test_a_loss_before_the_first_step(crew_of: MakeCrew) -> None:
    crew = crew_of(3, LocalSGD(2))
    crew.all(metric)
    crew.network.kill(2)
    assert set(crew.all(metric).values()) == {(2, 2, 1.0)}
    crew.all(Member.step)
    assert apart(crew)
    crew.all(Member.step)
    assert not apart(crew)


def test_one_that_is_on_its_own_takes_all_along(crew_of: MakeCrew) -> None:
    """A rank may have taken the step from which groups are on their own before the others. Then all are on their
    own."""
    crew = crew_of(3, LocalSGD(2, start=100))
    crew.all(Member.step)
    steps_of(crew.members[1])._alone = True
    crew.network.kill(2)
    crew.all(metric)
    assert list(crew.all(lambda member: steps_of(member)._alone).values()) == [True, True]
    crew.all(Member.step)
    assert apart(crew)


def test_nobody_leaves_an_averaging_out(crew_of: MakeCrew) -> None:
    """One rank may have counted an averaging that others have not. Then all make the next averaging."""
    crew = crew_of(3, LocalSGD(1))
    crew.all(Member.step)
    steps_of(crew.members[1]).round += 1
    crew.network.kill(2)
    crew.all(metric)
    for _ in range(2):
        crew.all(Member.step)
        assert not apart(crew)


def test_a_loss_within_a_step(crew_of: MakeCrew) -> None:
    """A rank whose group has lost a member completes the step, from the models with which all ranks have met."""
    crew = crew_of(4, LocalSGD(1, group_size=2, exchange="allreduce", aggregate="gradients"))
    crew.all(Member.step)
    crew.network.kill(3)
    crew.all(Member.step)
    crew.all(metric)
    assert [member.identity for member in crew.living] == [0, 1, 2]
    crew.all(Member.step)
    assert not apart(crew)
