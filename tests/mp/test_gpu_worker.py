"""The checks of tests/gpu where there is no GPU: the same ranks, the CPU's tensors for a simulated GPU's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from gpu_jobs import JOB_TIMEOUT_S, Jobs, World, lose_a_rank, names

from sordino.cli import mpi

WORLD = World(2, gpus=0)
# All checks the way that they would go on a GPU; of the other ways, that it is they that are gone.
WAYS = {"": "", "host": "operations.the_expected_way", "messages": "operations.the_expected_way"}
CASES = [pytest.param(WORLD, name, id=name) for way, word in WAYS.items() for name in names(WORLD, way, word)]


@pytest.fixture(scope="session")
def jobs(launcher: mpi.Launcher, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs.of(request.session, __file__, tmp_path_factory.mktemp("pretended_jobs"))


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_pretended(jobs: Jobs, world: World, name: str) -> None:
    jobs.check(world, name)


def test_a_lost_rank_is_named(launcher: mpi.Launcher, tmp_path: Path) -> None:
    if launcher.family != "openmpi":
        pytest.skip("written for Open MPI's launcher")
    lose_a_rank(WORLD, tmp_path, "under way")
