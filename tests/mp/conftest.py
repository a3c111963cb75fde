"""Fixtures for several files of this folder."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
