"""How slow this machine is right now. No test's verdict hangs on a clock alone: what has to be soon is bounded by what
it takes on an idle machine, times how much slower this one is, times a wide margin; and it is told at the end.

A limit that only ends a broken test is no verdict, and is simply long: `HANG_S`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

MARGIN = 20  # of any bound, over what an idle machine takes
HANG_S = 150  # longer than anything of a sound test takes, on a machine that does ten other things
_IDLE_START_S = 0.025  # of a Python process that imports nothing, on an idle machine of two cores
_MEMORY_S = 60.0  # what was slow lately may have slowed down what is judged now
_FRESH_S = 5.0

_measured: list[tuple[float, float]] = []  # when, and how many times slower
_times: dict[str, list[float]] = defaultdict(list)


def slowness() -> float:
    """How many times slower than an idle machine this one is, or has been within the last minute; at least 1.

    What is measured is the start of a process that does nothing. The load of the last minute counts as well, for a
    storm may just be over.
    """
    now = time.monotonic()
    _measured[:] = [one for one in _measured if now - one[0] < _MEMORY_S]
    if not _measured or now - _measured[-1][0] > _FRESH_S:
        _measured.append((now, _start_s() / _IDLE_START_S))
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(1.0, waiting, *(factor for _, factor in _measured))


def bound(expected_s: float, certain_s: float = 0.0) -> float:
    """The seconds that something may take at most.

    Args:
        expected_s: what it takes on an idle machine.
        certain_s: what passes before it on any machine: a silence, a deadline.
    """
    return certain_s + MARGIN * expected_s * slowness()


def stretched(seconds: float) -> float:
    """A deadline or a silence to set for a job, so that a busy machine does not pass for a fault. It has to pass in the
    test, so it grows by less than a bound."""
    return round(seconds * max(1.0, slowness() / 2), 1)


def _start_s() -> float:
    command = [sys.executable, "-I", "-S", "-c", ""]
    took = []
    for _ in range(3):
        begin = time.monotonic()
        subprocess.run(command, check=True)
        took.append(time.monotonic() - begin)
    return statistics.median(took)


@pytest.fixture(scope="session")
def note_time() -> Callable[[str, float], None]:
    """Keeps how many seconds something took, for the summary."""
    return lambda name, seconds: _times[name].append(seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hands what a worker of pytest-xdist has noted to whoever started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["times"] = dict(_times)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker has noted."""
    for name, seconds in getattr(node, "workeroutput", {}).get("times", {}).items():
        _times[name] += seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _times:
        return
    terminalreporter.section("time from a fault until it was mended")
    for name, seconds in sorted(_times.items()):
        median, worst = statistics.median(seconds), max(seconds)
        terminalreporter.write_line(
            f"{name}: median {median * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms of {len(seconds)}"
        )
    terminalreporter.write_line(f"on a machine that was {slowness():.1f} times as slow as an idle one at the end")
