"""Code that goes through an optimizer's attributes, as `hasattr`, `inspect` and debuggers do, gets no error."""

from __future__ import annotations

import inspect

import pytest
from finite_cases import leaf, wrap

from sordino import sim
from sordino.algorithms import names
from sordino.errors import UsageError


def look(algorithm: str, check_finite: bool) -> None:
    weight = leaf()
    optimizer = wrap({"w": weight}, algorithm, check_finite=check_finite)
    weight.sum().backward()
    optimizer.step()
    members = dict(inspect.getmembers(optimizer))
    assert members["param_groups"] is optimizer.param_groups
    counted = algorithm in ("adpsgd", "caps", "scheduled-pull")
    assert ("statistics" in members) == hasattr(optimizer, "statistics") == counted
    assert getattr(optimizer, "statistics", None) is members.get("statistics")
    assert not hasattr(optimizer, "no_such_thing")


@pytest.mark.parametrize("check_finite", (False, True))
@pytest.mark.parametrize("algorithm", names())
def test_all_attributes_can_be_looked_at(algorithm: str, check_finite: bool) -> None:
    sim.run(2, look, algorithm, check_finite)


@pytest.mark.parametrize("kind", (UsageError, AttributeError))
def test_who_asks_for_what_is_not_there_is_told_why(kind: type[Exception]) -> None:
    def ask() -> None:
        with pytest.raises(kind, match=r"AllReduce\(.*keeps no statistics"):
            _ = wrap({"w": leaf()}, "allreduce").statistics

    sim.run(1, ask)
