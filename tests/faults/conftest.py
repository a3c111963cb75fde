"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from crew import Crew, MakeCrew

from sordino._core import build_info


@pytest.fixture
def crew_of() -> Iterator[MakeCrew]:
    """Return a function that starts a crew, with the arguments of `Crew`. All crews leave at the end."""
    made: list[Crew] = []

    def make(*args: object, **options: object) -> Crew:
        made.append(Crew(*args, **options))
        return made[-1]

    yield make
    for crew in made:
        crew.end()


@pytest.fixture(params=["mpi", "ucx"])
def way(request: pytest.FixtureRequest, emulated_hosts: None) -> str:
    """Return the transport between the emulated hosts."""
    if request.param == "ucx" and not build_info()["ucx"]:
        pytest.skip("this build has no UCX")
    return str(request.param)
