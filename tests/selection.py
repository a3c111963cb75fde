"""Selection of the tests of a run of pytest: `--tier quick` (`make test`), `--tier all`, or `--slice k/M`, a part of
all.

The quick tier is chosen by rule:

- a check (tests/checks) runs in one world, and every value of its parameters once: see checks/worlds.py;
- the same holds for any other parametrized test: every value of every parameter once;
- of the drills and other expensive jobs, `@pytest.mark.drill("a class of fault")`, the first of each class runs, with
  one of the launchers that can start its ranks;
- tests marked `run_of_a_benchmark`, `extra`, `browser`, `framework`, or `soak` run only with `--tier all`. So the quick
  tier needs only the packages that README's commands install, which CI proves (.ci/run).

The M slices are about equal shares of all tests, distributed by name.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from checks.worlds import World, all_pairs, covering, quick_pairs

_WAYS = ("starter", "starter_anywhere", "way")  # fixtures of drills, each with a value per launcher or transport
_LATER = ("run_of_a_benchmark", "extra", "browser", "framework", "soak")  # markers of tests for `--tier all`
MARKERS = (
    "drill(kind): a job with a real fault, or another dear one; `make test` has the first of each kind",
    "run_of_a_benchmark: runs a benchmark for real; not in `make test`",
    "extra: needs a Debian package that README's commands do not install; not in `make test`",
    "browser: drives a real browser; not in `make test`",
    "framework: needs a framework of `make test-frameworks`, and may be skipped in CI; not in `make test`",
    "soak: repeats what other tests do, for longer; not in `make test`",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=("quick", "all"), default="quick", help="how many tests (tests/selection.py)")
    parser.addoption("--slice", metavar="k/M", type=part, help="part k of M of all tests")


_all_pairs = True  # whether all pairs of worlds and checks are collected


def pytest_configure(config: pytest.Config) -> None:
    global _all_pairs
    named = any("::" in word for word in config.args)
    _all_pairs = named or config.getoption("--tier") == "all" or config.getoption("--slice") is not None
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def part(text: str) -> tuple[int, int]:
    """Return k and M of "k/M"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    number, parts = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= parts:
        raise ValueError(f"{text!r} is not k/M with k from 1 to M, such as 1/8")
    return number, parts


def of_part(name: str, number: int, parts: int) -> bool:
    """Return whether a test with this name belongs to part `number` of `parts`."""
    return zlib.crc32(name.encode()) % parts == number - 1


def pairs_of(worlds: Iterable[World]) -> list[Any]:
    """Return the values of the parameters (world, check) of a test: all pairs that this run of pytest may select.

    There are about 40,000 pairs. Collecting them takes longer than many tests do.
    """
    kept = None if _all_pairs else quick_pairs()
    return [
        pytest.param(world, check, id=f"{world}-{check.name}")
        for world, check in all_pairs(worlds)
        if kept is None or (world, check.name) in kept
    ]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests. A test that was named by its id always runs."""
    share: tuple[int, int] | None = config.getoption("--slice")
    if share is not None:
        wanted = {item for item in items if of_part(item.nodeid, *share)}
    elif config.getoption("--tier") == "all":
        return
    else:
        wanted = quick(items)
        wanted |= {item for item in items if any("::" in word and item.nodeid in word for word in config.args)}
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def quick(items: list[pytest.Item]) -> set[pytest.Item]:
    pairs = quick_pairs()
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    drills: dict[str, list[pytest.Item]] = defaultdict(list)
    wanted = set()
    for item in items:
        values = parameters(item)
        drill = item.get_closest_marker("drill")
        if any(item.get_closest_marker(name) for name in _LATER):
            continue
        if drill is not None:
            drills[drill.args[0]].append(item)
        elif "check" in values and "world" in values:
            if (values["world"], values["check"].name) in pairs:
                wanted.add(item)
        else:
            functions[item.nodeid.partition("[")[0]].append(item)
    wanted |= {first_of(name, group) for name, group in drills.items()}
    for name, group in functions.items():
        wanted |= set(covering(group, parameters, name))
    return wanted


def first_of(drill: str, group: list[pytest.Item]) -> pytest.Item:
    """Return the first drill of a class with the launcher or transport whose turn it is."""
    ways = [next((str(parameters(item)[name]) for name in _WAYS if name in parameters(item)), "") for item in group]
    turn = sorted(set(ways))[zlib.crc32(drill.encode()) % len(set(ways))]
    return group[ways.index(turn)]


def parameters(item: pytest.Item) -> dict[str, Any]:
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}
