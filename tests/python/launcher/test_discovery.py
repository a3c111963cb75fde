"""Hosts that a discovery script names, slots that get processes, and processes that must end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sordino.errors import UsageError
from sordino.launcher.discovery import Cooldowns, Discovery, Host, Slot, free, parse, surplus

NAMES = st.sampled_from(["a", "b.c", "node-1"])
HOSTS = st.lists(st.builds(Host, NAMES, st.integers(1, 4)), unique_by=lambda host: host.name)
SLOTS = st.lists(st.builds(Slot, NAMES, st.integers(0, 5)), unique=True)


def test_lines_are_hosts() -> None:
    assert parse("node1:4\n\n  node2 \n[fd00::1]:2\nspare:0\n") == [
        Host("node1", 4),
        Host("node2", 1),
        Host("fd00::1", 2),
    ]
    for wrong in ("-oProxyCommand=x:1", "a b", "a:x", "a:1\na:2", "a;b"):
        with pytest.raises(ValueError):
            parse(wrong)


@given(HOSTS, SLOTS)
def test_each_slot_has_one_process_or_may_get_one(hosts: list[Host], taken: list[Slot]) -> None:
    every = [Slot(host.name, number) for host in hosts for number in range(host.slots)]
    free_here, gone = free(hosts, taken, Cooldowns(), 0.0), surplus(hosts, taken)
    assert free_here == [slot for slot in every if slot not in taken], "in the order of the hosts"
    assert set(gone) == set(taken) - set(every)


def test_a_host_rests_after_failures() -> None:
    """It rests for 1, 2 and 4 s after processes that failed soon, and not after one that lived long."""
    hosts, rests = [Host("a", 1), Host("b", 1)], Cooldowns()
    for wait in (1.0, 2.0, 4.0):
        rests.failed("a", 100.0, lived=0.5)
        assert free(hosts, [], rests, 100.0 + wait - 0.01) == [Slot("b", 0)]
        assert free(hosts, [], rests, 100.0 + wait) == [Slot("a", 0), Slot("b", 0)]
    rests.failed("b", 200.0, lived=60.0)
    assert Slot("b", 0) in free(hosts, [], rests, 200.0)


def looked_until(discovery: Discovery, seconds: float = 20.0) -> str:
    """Look until the script has run once. Return the problem."""
    discovery._next, limit = 0.0, time.monotonic() + seconds
    problem = discovery.look()
    while discovery._running is not None and time.monotonic() < limit:
        time.sleep(0.01)
        problem = discovery.look()
    return problem


def test_the_hosts_stay_when_the_script_fails(tmp_path: Path) -> None:
    """A problem is reported once, until there is another one."""
    said = tmp_path / "said"
    discovery = Discovery(f"sh {said}")
    try:
        said.write_text("echo a:2")
        assert looked_until(discovery) == "" and discovery.hosts == [Host("a", 2)]
        for script, problem in (("echo b:1; exit 3", "status 3"), ("echo 'no host'", "'no host' is neither")):
            said.write_text(script)
            assert problem in looked_until(discovery)
            assert looked_until(discovery) == "" and discovery.hosts == [Host("a", 2)]
            assert problem in discovery.problem
        said.write_text("echo b:1")
        assert looked_until(discovery) == "" and discovery.hosts == [Host("b", 1)] and not discovery.problem
        said.write_text("sleep 1000")
        discovery._next = 0.0
        discovery.look()
        discovery._begun -= 1000
        assert "not ended" in discovery.look()
    finally:
        discovery.close()


def test_a_script_that_does_not_exist() -> None:
    discovery = Discovery("/no/such/script")
    try:
        assert "/no/such/script: No such file" in discovery.look()
    finally:
        discovery.close()
    for wrong, message in (("'", "No closing quotation"), (" ", "is empty")):
        with pytest.raises(UsageError, match=message):
            Discovery(wrong)
