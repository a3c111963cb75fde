"""Fixtures for several files of this folder."""

from __future__ import annotations

import pytest
from ports import free_ports


@pytest.fixture
def free_port() -> int:
    return free_ports()
