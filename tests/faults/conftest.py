"""How long faults took to be mended, told at the end of a run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable

import pytest

_times: dict[str, list[float]] = defaultdict(list)


@pytest.fixture(scope="session")
def note_time() -> Callable[[str, float], None]:
    """Keeps how many seconds something took, for the summary."""
    return lambda name, seconds: _times[name].append(seconds)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _times:
        return
    terminalreporter.section("time from a fault until it was mended")
    for name, seconds in sorted(_times.items()):
        median, worst = statistics.median(seconds), max(seconds)
        terminalreporter.write_line(
            f"{name}: median {median * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms of {len(seconds)}"
        )
