"""Fixtures for several files of this folder."""

from __future__ import annotations

import pytest
from ports import free_ports


@pytest.fixture
def free_port() -> int:
    """Return an unused port of this machine."""
    return free_ports()
