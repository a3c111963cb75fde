"""What all tests share: the folder of checks on the path, one thread a rank, mpirun, and Hypothesis without a clock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from sordino.cli import mpi
from sordino.errors import NotBuilt

sys.path.insert(0, str(Path(__file__).resolve().parent))

torch.set_num_threads(1)
settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def launcher() -> mpi.Launcher:
    """A real mpirun; without one there is nothing to launch with."""
    try:
        return mpi.find_launcher(mpi.build_info(), os.environ)
    except NotBuilt as error:
        pytest.skip(f"needs an MPI: {error}")
