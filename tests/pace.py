"""Current slowness of this machine. No test's verdict depends on a clock alone. A time limit is the time on an idle
machine, times the slowness of this one, times a wide margin. Measured times are printed at the end.

A limit that only ends a hanging test decides nothing, so it is simply long: `HANG_S`.
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

MARGIN = 20  # factor between a bound and the time on an idle machine
HANG_S = 150  # longer than any correct test takes, on a machine that does ten other things
_IDLE_START_S = 0.025  # start of a Python process without imports, on an idle machine of two cores
_MEMORY_S = 60.0  # a measurement counts for this long
_FRESH_S = 5.0

_measured: list[tuple[float, float]] = []  # time of each measurement, and the slowness
_times: dict[str, list[float]] = defaultdict(list)


def slowness() -> float:
    """Return the factor by which this machine is slower than an idle one, now or within the last minute; at least 1.

    The start of a process that does nothing is measured. The load of the last minute counts as well, as a busy phase
    may just have ended.
    """
    now = time.monotonic()
    _measured[:] = [one for one in _measured if now - one[0] < _MEMORY_S]
    if not _measured or now - _measured[-1][0] > _FRESH_S:
        _measured.append((now, _start_s() / _IDLE_START_S))
    waiting = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return max(1.0, waiting, *(factor for _, factor in _measured))


def bound(expected_s: float, certain_s: float = 0.0) -> float:
    """Return the longest permitted time, in seconds.

    Args:
        expected_s: time on an idle machine, in seconds.
        certain_s: time that passes before it on any machine, in seconds, such as a silence or a deadline.
    """
    return certain_s + MARGIN * expected_s * slowness()


def stretched(seconds: float) -> float:
    """Return a deadline or a silence for a job, in seconds, so long that a busy machine does not count as a fault. It
    grows by less than a bound does, because the test has to wait for it."""
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
    """Return a function that notes the seconds of an event for the summary."""
    return lambda name, seconds: _times[name].append(seconds)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the notes of a pytest-xdist worker to the main process."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["times"] = dict(_times)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the notes of a pytest-xdist worker."""
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
