"""The checks again, with every tensor in the memory of a simulated GPU (a thread) or of the stand-in for CUDA. They
test the handling of devices in the core, and of their tensors in Python, without a GPU: on one node, with every rank on
its own node, and in between. With the stand-in, CUDA's half of the core runs as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks.registry import Check, compare
from checks.worlds import DEVICES, World, all_pairs
from pretended import devices
from selection import of_part, pairs_of

from sordino import sim

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cuda_on_cpu"))

from job import Job

LIMIT_S = 1800
# In `make test`, the simulated GPU runs all checks, and the stand-in every twelfth one.
ON_STAND_IN = [
    pytest.param(world, check, id=name, marks=[] if of_part(name, 1, 12) else pytest.mark.soak)
    for world, check in all_pairs(DEVICES)
    for name in [f"{world}-{check.name}"]
]


@pytest.mark.parametrize(("world", "check"), pairs_of(DEVICES))
def test_on_pretended_devices(world: World, check: Check, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = devices(world.kind, world.ranks, monkeypatch)
    options = {"ranks_per_node": world.per_node, "algorithm": check.algorithm(world.ranks), "devices": gpus}
    compare(sim.run(world.ranks, check.run, "sim", str(tmp_path), **options))


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("on_stand_in")
    job = Job.of(request.session, __file__, "test_on_the_stand_in_for_cuda", folder)
    yield job
    job.end()


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(("world", "check"), ON_STAND_IN)
def test_on_the_stand_in_for_cuda(job: Job, world: World, check: Check) -> None:
    job.check(f"{world} {check.name}", 0.9 * LIMIT_S)
