"""A rank is killed between or within the exchanges of an algorithm; ranks are threads. The remaining ranks continue
from the same values, and count the same exchanges."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import PATIENCE_S, Crew, MakeCrew, Member, metric

from sordino.algorithms import (
    ADPSGD,
    Algorithm,
    CaPS,
    Crossover,
    DiLoCo,
    ElasticAveraging,
    LocalSGD,
    NoLoCo,
    PushSum,
)
from sordino.codecs import Codec, Int8, TopK
from sordino.errors import PeerLost


def steps_of(member: Member) -> Any:
    return member.optimizer._strategy


def flat(member: Member) -> torch.Tensor:
    return torch.cat([value.flatten() for value in member.values()])


def apart(crew: Crew) -> bool:
    models = list(crew.all(flat).values())
    assert len(models) > 1, [member.ended for member in crew.members]
    return any(float((model - models[0]).abs().max()) > 1e-9 for model in models)


def apart_after_steps(crew: Crew, count: int) -> list[bool]:
    seen = []
    for _ in range(count):
        crew.all(Member.step)
        seen.append(apart(crew))
    return seen


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
    assert apart_after_steps(crew, 4) == [True, True, True, False]


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
    """One rank may already have taken the step from which groups train on their own. After a loss, all groups do."""
    crew = crew_of(3, LocalSGD(2, start=100))
    crew.all(Member.step)
    steps_of(crew.members[1])._alone = True
    crew.network.kill(2)
    crew.all(metric)
    assert list(crew.all(lambda member: steps_of(member)._alone).values()) == [True, True]
    crew.all(Member.step)
    assert apart(crew)


def test_nobody_leaves_an_averaging_out(crew_of: MakeCrew) -> None:
    """One rank may have counted an averaging that the others have not. All ranks make the next averaging."""
    crew = crew_of(3, LocalSGD(1))
    crew.all(Member.step)
    steps_of(crew.members[1]).round += 1
    crew.network.kill(2)
    crew.all(metric)
    for _ in range(2):
        crew.all(Member.step)
        assert not apart(crew)


def test_a_loss_within_a_step(crew_of: MakeCrew) -> None:
    """A rank whose group has lost a member completes the step, from the model that all ranks have after the
    recovery."""
    crew = crew_of(4, LocalSGD(1, group_size=2, exchange="allreduce", aggregate="gradients"))
    crew.all(Member.step)
    crew.network.kill(3)
    crew.all(Member.step)
    crew.all(metric)
    assert [member.identity for member in crew.living] == [0, 1, 2]
    crew.all(Member.step)
    assert not apart(crew)


@pytest.mark.parametrize("size", [1, 2])
def test_groups_stay_together_until_the_rate_falls(crew_of: MakeCrew, size: int) -> None:
    """However a rank notices a loss, it does not take the loss for a fall of the learning rate. Until groups train on
    their own, all ranks have one model."""
    algorithm = LocalSGD(2, group_size=size, exchange="allreduce", start="decay")

    def go_on(member: Member) -> tuple[int, int, float]:
        for _ in range(12):
            member.step()
        return metric(member)

    for delay_ms in (0, 1, 2, 3, 4, 6, 8, 12):
        crew = crew_of(4, algorithm)
        crew.all(Member.step)
        crew.order(go_on)
        time.sleep(delay_ms * 1e-3)
        crew.network.kill(3)
        crew.settle()
        crew.all(Member.step)
        assert len(crew.living) == 3
        assert not any(crew.all(lambda member: member.optimizer._strategy._alone).values())  # type: ignore[union-attr]
        models = list(crew.all(Member.values).values())
        assert all(torch.equal(one, first) for model in models for one, first in zip(model, models[0]))


@pytest.mark.parametrize(
    "algorithm", [LocalSGD(1, exchange="allreduce"), Crossover(), Crossover(compression="int8")], ids=str
)
def test_an_exchange_that_one_had_to_give_up(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    """The exchange counts for all ranks. Otherwise a rank that gave it up would make one more than ranks that completed
    it."""
    crew = crew_of(4, algorithm)
    crew.all(Member.step)
    done, lost = threading.Event(), threading.Event()

    def step(member: Member) -> None:
        steps = member.optimizer._strategy
        name = "_average" if isinstance(algorithm, LocalSGD) else "_mix"
        exchange = getattr(steps, name)

        def give_up() -> None:
            setattr(steps, name, exchange)
            exchange()
            done.set()
            assert lost.wait(PATIENCE_S)
            raise PeerLost("rank 3 is gone", [3])

        if member.identity == 1:
            setattr(steps, name, give_up)
        member.step()

    crew.order(step)
    assert done.wait(PATIENCE_S)
    crew.network.kill(3)
    lost.set()
    crew.settle()
    assert len(set(crew.all(lambda member: member.optimizer._strategy.round).values())) == 1
    assert crew.all(Member.train) == dict.fromkeys(range(3), 5)


def test_who_is_a_step_behind_finds_the_centre_alone(crew_of: MakeCrew) -> None:
    """ElasticAveraging: a rank that is a step behind does not wait for the other one, which may have taken its last
    step."""
    crew = crew_of(3, ElasticAveraging())
    crew.all(Member.step)
    crew.network.kill(2)
    crew.all(Member.step)
    assert [member.identity for member in crew.living] == [0, 1]
    crew.members[0].orders.put(lambda member: member.optimizer._strategy.begin(member.optimizer) or "begun")
    assert crew.members[0].answers.get(timeout=PATIENCE_S) == "begun"
    one, other = crew.all(centre).values()
    assert all(map(torch.equal, one, other))
    crew.all(Member.step)


def centre(member: Member) -> list[torch.Tensor]:
    """Return the center of elastic averaging. Check that it is the mean that all remaining ranks have just taken."""
    found: list[torch.Tensor] = member.optimizer._strategy.state_dict()["centre"]
    flat = torch.cat([value.flatten() for value in member.values()])
    assert torch.equal(torch.cat(found)[: len(flat)], flat)
    return found


def test_momenta_are_equal_after_a_loss(crew_of: MakeCrew) -> None:
    """DiLoCo: some ranks may have taken the outer step of a lost exchange, and others not."""
    crew = crew_of(3, DiLoCo(2, outer_lr=0.7, outer_momentum=0.9))
    for _ in range(2):
        crew.all(Member.step)

    def outer(member: Member) -> torch.Tensor:
        state = member.optimizer._strategy.state_dict()
        return torch.cat([*state["momentum"], *state["outer"]])

    steps_of(crew.members[0])._mixing._fragments[0].momentum[0].add_(1)
    crew.network.kill(2)
    for _ in range(4):
        crew.all(Member.step)
    one, other = crew.all(outer).values()
    assert torch.equal(one, other)
    assert not apart(crew)


BACKGROUND = DiLoCo(4, outer_lr=0.7, outer_momentum=0.9, overlap=2)


def outer_state(member: Member) -> dict[str, Any]:
    state: dict[str, Any] = member.optimizer.state_dict()["sordino"]
    return state


def continue_together(crew: Crew, steps: int) -> None:
    """Take steps, with an exchange among them. Check after each that the remaining ranks have the same outer state."""
    for _ in range(steps):
        crew.all(Member.step)
        one, other = crew.all(outer_state).values()
        assert all(map(torch.equal, [*one["outer"], *one["momentum"]], [*other["outer"], *other["momentum"]]))
        assert one["round"] == other["round"]
    assert one["round"] > 1 and any(float(momentum.abs().max()) > 0 for momentum in one["momentum"])


@pytest.mark.parametrize("noticed_by", ["step", "state_dict", "flush"])
def test_an_exchange_in_flight_is_given_up(crew_of: MakeCrew, noticed_by: str) -> None:
    """The lost rank has not begun the exchange. The mean of the remaining models becomes the outer parameters."""
    crew = crew_of(3, BACKGROUND)
    for _ in range(3):
        crew.all(Member.step)
    crew.living = crew.members[:2]
    for _ in range(2):
        crew.all(Member.step)
    start = crew.members[0].optimizer._strategy._mixing._fragments[0].outer[0].clone()  # type: ignore[union-attr]
    own = list(crew.all(flat).values())
    done = {"step": Member.step, "state_dict": outer_state, "flush": lambda member: member.optimizer.flush()}
    crew.order(done[noticed_by])
    time.sleep(0.02)
    crew.network.kill(2)
    crew.settle()
    for state in crew.all(outer_state).values():
        assert "pending" not in state and not torch.cat(state["momentum"]).any()
        assert not torch.equal(state["outer"][0], start)
        if noticed_by != "step":
            torch.testing.assert_close(state["outer"][0], torch.stack(own).mean(0), rtol=1e-12, atol=1e-12)
    assert not apart(crew)
    continue_together(crew, 7)


def test_encoded_averages_count_from_the_mean_of_the_remaining_models(crew_of: MakeCrew) -> None:
    """Local SGD with a codec: a rank dies within an interval."""
    crew = crew_of(3, LocalSGD(4, compression="TopK(ratio=1, chunk=32, bits=32)"))
    for _ in range(6):
        crew.all(Member.step)
    before = crew.all(flat)
    crew.network.kill(2)
    crew.all(metric)
    mean = torch.stack([before[rank] for rank in (0, 1)]).mean(0)
    for state in crew.all(outer_state).values():
        outer = torch.cat([one.flatten() for one in state["outer"].values()])
        torch.testing.assert_close(outer, mean, rtol=1e-12, atol=1e-12)
    assert apart_after_steps(crew, 4) == [True, True, True, False]


def test_one_has_taken_an_outer_step_that_the_other_has_not(crew_of: MakeCrew) -> None:
    crew = crew_of(3, BACKGROUND)
    for _ in range(5):
        crew.all(Member.step)
    crew.all(outer_state)  # which waits for the means
    everyone, crew.living = crew.living, crew.members[:1]
    crew.all(Member.step)
    crew.living = everyone
    crew.network.kill(2)
    crew.all(metric)
    assert not apart(crew)
    crew.living = crew.members[1:2]
    crew.all(Member.step)
    crew.living = crew.members[:2]
    continue_together(crew, 7)


def test_outer_states_of_pairs_are_equal_after_a_loss(crew_of: MakeCrew) -> None:
    """NoLoCo: the two remaining ranks are a pair, which starts again from one model without momentum."""
    crew = crew_of(3, NoLoCo(2))
    for _ in range(3):
        crew.all(Member.step)

    def outer(member: Member) -> list[torch.Tensor]:
        state = member.optimizer._strategy.state_dict()
        return [torch.cat([one.flatten() for one in state[key].values()]) for key in ("outer", "momentum")]

    before = crew.all(flat)
    crew.network.kill(2)
    crew.all(metric)
    mean = torch.stack([before[rank] for rank in (0, 1)]).mean(0)
    for values, momentum in crew.all(outer).values():
        torch.testing.assert_close(values, mean, rtol=1e-12, atol=1e-12)
        assert not momentum.any()
    for _ in range(3):
        crew.all(Member.step)
    one, other = crew.all(outer).values()
    assert all(map(torch.equal, one, other)) and one[1].any()


def test_statistics_of_skipping_stay_when_a_rank_is_alone(crew_of: MakeCrew, tmp_path: Path) -> None:
    crew = crew_of(2, CaPS())
    crew.all(Member.train)
    crew.network.kill(1)

    def statistics(member: Member) -> Any:
        member.train()
        member.optimizer.report_metric(1.0)
        return member.optimizer.statistics

    found = crew.all(statistics)[0]
    assert len(found.names) == len(found.bytes) == 4
    assert [(point.step, point.steps, len(point.ratios)) for point in found.points] == [(6, 3, 4)]
    assert found.bytes_unskipped == 3 * sum(found.bytes)
    found.plot(tmp_path / "found.png")


COLLECTED = [
    CaPS(threshold=101),
    PushSum(overlap=2),
    ElasticAveraging(),
    ADPSGD(),
    LocalSGD(4, aggregate="gradients"),
    LocalSGD(4, group_size=2, exchange="allreduce", aggregate="gradients"),
    Crossover(group_size=2),
    NoLoCo(1, compression="int4"),
]


@pytest.mark.parametrize("algorithm", COLLECTED, ids=str)
def test_losses_while_all_is_taken_in_and_parameters_are_added(crew_of: MakeCrew, algorithm: Algorithm) -> None:
    def work(member: Member) -> tuple[int, int, float]:
        for _ in range(3):
            member.step()
            member.optimizer.flush()
        extra = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        member.optimizer.add_param_group({"params": [extra]})
        member.optimizer.flush()
        member.flat = torch.cat([*map(torch.flatten, member.values()), extra.detach()])  # type: ignore[attr-defined]
        return metric(member)

    for delay_ms in (1, 3, 5, 7, 9, 12, 16, 20):
        crew = crew_of(6, algorithm)
        crew.all(metric)
        crew.order(work)
        time.sleep(delay_ms * 1e-3)
        crew.network.kill(2)
        crew.settle()
        assert {member.identity for member in crew.living} == {0, 1, 3, 4, 5}, [one.ended for one in crew.members]
        models: list[torch.Tensor] = list(crew.all(lambda member: member.flat).values())  # type: ignore[attr-defined]
        assert all(bool(model.isfinite().all()) for model in models)
        # No rank continues with the intermediate result of an averaging that was given up.
        most = 9 if isinstance(algorithm, LocalSGD) else 4
        assert all(float(model.abs().max()) < most for model in models)


@pytest.mark.parametrize("compression", [None, Int8(), TopK()])
def test_an_outer_gradient_in_flight_leaves_nothing(crew_of: MakeCrew, compression: Codec | None) -> None:
    """An encoded outer gradient is an operation like those that a script starts. It ends when it is given up."""
    crew = crew_of(3, DiLoCo(4, overlap=2, compression=compression))
    for _ in range(3):
        crew.all(Member.step)
    crew.network.kill(2)
    crew.order(Member.step)  # a rank may notice the loss only after it has begun the exchange
    crew.settle()
    assert crew.all(lambda member: dict(member.context.pending._operations)) == {0: {}, 1: {}}
    assert not any(crew.all(lambda member: steps_of(member).outer_step.pending).values())
