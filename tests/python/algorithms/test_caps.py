"""Parameter skipping without ranks: the scheduler of the threshold, the servers of tensors, and refused settings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sordino.algorithms import CaPS, ThresholdScheduler
from sordino.algorithms.caps import place_by_size
from sordino.errors import UsageError

DEFAULT = ThresholdScheduler()
AT_LIMITS = ThresholdScheduler(lower=10, upper=10.5)


@pytest.mark.parametrize(
    ("scheduler", "epochs", "metrics", "after"),
    [
        (DEFAULT, 5, [3, 2, 1], 9),
        (DEFAULT, 5, [9, 9, 3, 2, 1], 9),  # only the last three values count
        (DEFAULT, 5, [1, 2, 3], 11),
        (DEFAULT, 5, [3, 1, 2], 11),
        (DEFAULT, 5, [3, 3, 3], 11),
        (DEFAULT, 5, [3, 2, math.nan], 11),
        (DEFAULT, 5, [math.inf, 2, 1], 9),
        (DEFAULT, 5, [2, 1], 10),
        (DEFAULT, 5, [], 10),
        (DEFAULT, 4, [3, 2, 1], 10),
        (DEFAULT, 6, [1, 2, 3], 10),
        (DEFAULT, 10, [1, 2, 3], 11),
        (ThresholdScheduler(mode="max"), 5, [0.1, 0.2, 0.3], 9),
        (ThresholdScheduler(mode="max"), 5, [0.3, 0.2, 0.1], 11),
        (ThresholdScheduler(mode="max"), 5, [0.1, 0.3, 0.2], 11),
        (ThresholdScheduler(improving="keep"), 5, [3, 2, 1], 10),
        (ThresholdScheduler(improving="keep"), 5, [1, 2, 3], 11),
        (ThresholdScheduler(step=2.5), 5, [3, 2, 1], 7.5),
        (ThresholdScheduler(history_length=2, frequency=1), 1, [2, 1], 9),
        (AT_LIMITS, 5, [3, 2, 1], 10),
        (AT_LIMITS, 5, [1, 2, 3], 10.5),
    ],
)
def test_the_threshold_follows_the_metric(scheduler, epochs, metrics, after) -> None:
    assert scheduler.threshold_after(epochs, 10.0, metrics) == after


@given(
    st.lists(st.floats(allow_nan=True), max_size=40),
    st.integers(2, 5),
    st.integers(1, 4),
    st.floats(0.1, 30),
    st.sampled_from(["min", "max"]),
)
@example([3.0, 2.0, 1.0], 2, 1, 7.0, "min")  # falls below its bound without a limit
@example([3.0, 2.0, 1.0], 2, 1, 17.0, "max")  # rises above its bound without a limit
def test_the_threshold_never_crosses_its_bounds(metrics, length, frequency, step, mode) -> None:
    scheduler = ThresholdScheduler(length, frequency, step, lower=5, upper=20, mode=mode)
    threshold = 10.0
    for epoch in range(1, len(metrics) + 1):
        before, threshold = threshold, scheduler.threshold_after(epoch, threshold, metrics[:epoch])
        assert 5 <= threshold <= 20
        assert abs(threshold - before) <= step * (1 + 1e-9)


def test_lower_thresholds_skip_more_when_training_goes_well() -> None:
    threshold = 10.0
    for epoch in range(1, 21):
        threshold = DEFAULT.threshold_after(epoch, threshold, [1 / k for k in range(1, epoch + 1)])
    assert threshold == 10 - 20 / 5


# ---- servers -------------------------------------------------------------------------------------------------------


def fullest(sizes: list[int], placed: tuple[int, ...] | list[int], servers: int) -> int:
    return max(sum(size for size, place in zip(sizes, placed) if place == server) for server in range(servers))


@given(st.lists(st.integers(0, 60), max_size=7), st.integers(1, 4))
def test_loads_are_within_four_thirds_of_the_best(sizes: list[int], servers: int) -> None:
    placed = place_by_size(sizes, servers)
    assert all(0 <= server < servers for server in placed)
    best = min(fullest(sizes, one, servers) for one in itertools.product(range(servers), repeat=len(sizes)))
    assert fullest(sizes, placed, servers) <= (4 / 3 - 1 / (3 * servers)) * best + 1e-9


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 16))
def test_loads_of_many_tensors(sizes: list[int], servers: int) -> None:
    """The best assignment is at least the mean and the largest tensor."""
    floor = max(sum(sizes) / servers, max(sizes))
    if len(sizes) > servers:
        ordered = sorted(sizes, reverse=True)
        floor = max(floor, ordered[servers - 1] + ordered[servers])  # two of these tensors share a server
    assert fullest(sizes, place_by_size(sizes, servers), servers) <= 4 / 3 * floor + 1e-9


def test_who_serves() -> None:
    def served(servers: int | None, size: int, dedicated: bool = False) -> list[int]:
        algorithm = CaPS(exchange="parameter-server", servers=servers, dedicated_servers=dedicated)
        return algorithm.serving_ranks(size)

    assert served(None, 3) == [0, 1, 2]
    assert served(2, 8) == [0, 4]  # spread over the nodes
    assert served(2, 8, dedicated=True) == [6, 7]
    with pytest.raises(UsageError, match=r"servers=4.*must be at most 3"):
        served(4, 3)
    roles = CaPS(exchange="parameter-server", servers=1, dedicated_servers=True).roles([0, 0, 1])
    assert roles.workers == [0, 1] and roles.helpers == [2]
    with pytest.raises(UsageError, match="no rank is left to train"):
        CaPS(exchange="parameter-server", servers=2, dedicated_servers=True).roles([0, 0])


# ---- refused settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("detector", "psychic"),
        ("threshold", -1),
        ("threshold", math.nan),
        ("digits", -1),
        ("digits", 16),
        ("threshold", "10"),
        ("digits", 2.5),
        ("digits", True),
        ("sample_ratio", 0),
        ("sample_ratio", "1"),
        ("sample_ratio", 1.1),
        ("survey_interval", 0),
        ("memory", -0.1),
        ("memory", 1),
        ("probe_interval", 0),
        ("probe_interval", True),
        ("scheduler", "default"),
        ("exchange", "mail"),
        ("servers", 2),  # all-reduce has no servers
        ("dedicated_servers", True),
        ("granularity", "element"),
        ("block_bytes", 0),
        ("block_bytes", 100),
        ("buffers", "some"),
        ("statistics_interval", 0),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_settings_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"CaPS\({field}="):
        CaPS(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("history_length", 1),
        ("frequency", 0),
        ("step", 0),
        ("lower", -1),
        ("upper", 0.5),
        ("mode", "best"),
        ("improving", "raise"),
    ],
)
def test_schedulers_that_make_no_sense(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=rf"ThresholdScheduler\({field}="):
        ThresholdScheduler(**{field: value})  # type: ignore[arg-type]


def test_a_threshold_lies_within_its_bounds() -> None:
    with pytest.raises(UsageError, match=r"threshold=30.*1.0 and 20"):
        CaPS(threshold=30, scheduler=ThresholdScheduler(upper=20))
