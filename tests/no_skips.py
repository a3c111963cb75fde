"""Pytest plugin for CI, where everything is installed: a test that is skipped because something is missing fails.

Tests that need a GPU, run only without a GPU, or need a framework (`make test-frameworks`) may be skipped.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

_GPU_TESTS = Path(__file__).resolve().parent / "gpu"
# Prefixes of permitted reasons: of tests that need a GPU, and of tests that run only without one.
_ALLOWED = ("no CUDA", "a GPU is there")


def may_skip(item: pytest.Item, reason: str) -> bool:
    """Return whether a test may be skipped in CI."""
    return (
        item.get_closest_marker("gpu") is not None
        or item.get_closest_marker("framework") is not None
        or _GPU_TESTS in item.path.parents
        or reason.removeprefix("Skipped: ").startswith(_ALLOWED)
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, None, None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not may_skip(item, reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} is skipped in CI, where everything is installed ({reason}). Install what is missing there, "
            "or, if only a machine with GPUs can have it, mark the test with `gpu`."
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, None, None]:
    """Fail a module that skips all its tests while it is imported."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if os.environ.get("CI") and report.skipped and _GPU_TESTS not in collector.path.parents:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} is skipped in CI, where everything is installed ({reason})."
