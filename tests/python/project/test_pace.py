"""Bounds on time grow with the slowness of the machine."""

from __future__ import annotations

import os

import pace
import pytest


@pytest.mark.parametrize(("start_s", "load", "factor"), [(0.01, 0.0, 1.0), (0.25, 0.0, 10.0), (0.01, 8.0, 4.0)])
def test_bounds(monkeypatch: pytest.MonkeyPatch, start_s: float, load: float, factor: float) -> None:
    monkeypatch.setattr(pace, "_measured", [])
    monkeypatch.setattr(pace, "_start_s", lambda: start_s)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert pace.slowness() == pytest.approx(factor)
    assert pace.bound(0.5, 3.0) == pytest.approx(3.0 + pace.MARGIN * 0.5 * factor)
    assert pace.stretched(3.0) == pytest.approx(max(3.0, 1.5 * factor))


def test_this_machine() -> None:
    assert 1 <= pace.slowness() < 1000
