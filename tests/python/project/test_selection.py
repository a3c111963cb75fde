"""The tests that `make test` keeps, by rule: every world, every check function and every value of a parameter."""

from __future__ import annotations

from collections import Counter

import pytest
import selection
from checks.registry import all_checks
from checks.worlds import QUICK_WORLDS, STARTS, WORLDS, all_pairs, covering, quick_pairs
from hypothesis import given
from hypothesis import strategies as st
from selection import of_part, pairs_of, part


def test_every_world_has_checks_and_launchers_start_four_jobs() -> None:
    found = Counter(world for world, _ in quick_pairs())
    assert set(found) == set(QUICK_WORLDS)
    assert min(found.values()) >= 10, found
    for launcher, ranks in STARTS.items():
        assert {world.ranks for world in found if world.launcher == launcher} == set(ranks) and len(ranks) == 2
    # Quick worlds have every layout of ranks, at least with threads.
    layouts = {(world.ranks, world.per_node) for world in QUICK_WORLDS}
    assert {(world.ranks, world.per_node) for world in WORLDS} == layouts


def test_every_function_and_every_value_stays() -> None:
    checks = all_checks()
    chosen = [checks[name] for _, name in quick_pairs()]
    assert {check.function for check in checks.values()} == {check.function for check in chosen}

    def values(some: list) -> set:
        return {(check.function, name, repr(value)) for check in some for name, value in check.arguments.items()}

    assert values(list(checks.values())) == values(chosen)
    assert {(one.function, one.helpers) for one in checks.values()} == {(one.function, one.helpers) for one in chosen}


def test_a_chosen_check_fits_its_world() -> None:
    everything = {(world, check.name) for world, check in all_pairs(WORLDS)}
    assert quick_pairs() <= everything


@pytest.mark.parametrize("everything", [False, True])
def test_pairs_that_are_never_selected_are_not_collected(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_all_pairs", everything)
    found = {(one.values[0], one.values[1].name) for one in pairs_of(WORLDS)}
    wanted = {(world, check.name) for world, check in all_pairs(WORLDS)} if everything else quick_pairs()
    assert found == wanted


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), name=st.text())
def test_few_combinations_have_all_values(sizes: list[int], name: str) -> None:
    cases: list[dict[str, int]] = [{}]
    for number, size in enumerate(sizes):
        cases = [{**case, f"p{number}": value} for case in cases for value in range(size)]
    chosen = covering(cases, lambda case: case, name)
    assert {item for case in chosen for item in case.items()} == {item for case in cases for item in case.items()}
    assert max(sizes) <= len(chosen) <= sum(sizes)


@given(names=st.lists(st.text(), unique=True), parts=st.integers(1, 20))
def test_parts_together_are_everything_once(names: list[str], parts: int) -> None:
    dealt = [name for number in range(1, parts + 1) for name in names if of_part(name, number, parts)]
    assert sorted(dealt) == sorted(names)


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "1/0", "a/b", "-1/3"])
def test_a_part_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not k/M with k from 1 to M"):
        part(text)
