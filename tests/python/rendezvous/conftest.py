"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from test_socket_rendezvous import Launcher


@pytest.fixture
def launcher_of_ranks(tmp_path: Path) -> Iterator[Launcher]:
    one = Launcher(tmp_path)
    one.start()
    yield one
    one.end()
