"""Ranks on real GPUs: all on one GPU and, if there are two, one GPU each."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gpu_jobs import JOB_TIMEOUT_S, Jobs, World, lose_a_rank, names

# From version 2.30 on, NCCL lets several ranks share a GPU if a setting allows it.
SHARED = {"nccl": "operations"} if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else {}
# Worlds, and for each the routes and the checks that run with them.
WORLDS = (
    (World(1), {"": ""}),
    (World(2), {"": "", "host": "", "messages": "operations", **SHARED}),
    (World(4), {"": "", "host": "algorithms", "messages": "algorithms"}),
    (World(2, gpus=2), {"": "", "ipc": ""}),
)
CASES = [
    pytest.param(world, name, id=f"{world}-{name}")
    for world, ways in WORLDS
    for way, word in ways.items()
    for name in names(world, way, word)
]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(JOB_TIMEOUT_S + 60)]


@pytest.fixture(scope="session")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs.of(request.session, __file__, tmp_path_factory.mktemp("gpu_jobs"))


@pytest.mark.parametrize(("world", "name"), CASES)
def test_on_gpus(jobs: Jobs, world: World, name: str) -> None:
    if torch.cuda.device_count() < world.gpus:
        pytest.skip(f"needs {world.gpus} GPUs")
    jobs.check(world, name)


@pytest.mark.parametrize("way", ["", "host"])
@pytest.mark.parametrize("when", ["between", "under way", "exchange"])
def test_a_lost_rank_is_named(tmp_path: Path, when: str, way: str) -> None:
    lose_a_rank(World(3), tmp_path, when, way)
