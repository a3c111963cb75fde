"""The launchers of a drill's ranks: `sordino run` by itself, or by mpirun."""

from __future__ import annotations

import pytest
from launched import Launched


def _start_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, starter: str) -> str:
    if starter != "local" and request.getfixturevalue("launcher").family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    monkeypatch.setattr(Launched, "starter", starter)
    return starter


@pytest.fixture(params=["local", "mpi"])
def starter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each launcher. `make test` runs a drill with one, which depends on its class (tests/selection.py)."""
    return _start_by(request, monkeypatch, request.param)


@pytest.fixture(params=["local", "mpi", "hosts"])
def starter_anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each launcher, and mpirun with a list of hosts, which learns its ranks in another way."""
    return _start_by(request, monkeypatch, request.param)


@pytest.fixture
def by_mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of mpirun itself."""
    _start_by(request, monkeypatch, "mpi")
