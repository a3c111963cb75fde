"""Fixtures and settings of all tests: plugins, one thread per rank, mpirun, emulated hosts, and Hypothesis without a
deadline."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import results
from cluster import Cluster, mpirun
from results import ResultsOf
from sordino._core import kernels
from sordino.errors import NotBuilt
from sordino.launcher import mpi

pytest_plugins = ["no_skips", "pace", "selection", "launched"]
os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX messages do not leave the machine
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup; jobs of tests must not inherit that
    signal.signal(signal.SIGHUP, lambda *_: None)
torch.set_num_threads(1)
# If two threads compute the first matrix product of a process at once, another kernel may run, which gives other bits.
torch.nn.functional.linear(torch.ones(6, 13), torch.ones(7, 13))
torch.nn.functional.linear(torch.ones(6, 13).double(), torch.ones(7, 13).double())
settings.register_profile(
    "default",
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def thorough(request: pytest.FixtureRequest) -> bool:
    """Return whether long tests run: in all runs except `make test`."""
    return request.config.getoption("--tier") == "all" or request.config.getoption("--slice") is not None


@pytest.fixture
def level_as_before() -> Iterator[None]:
    """Restore the kernels' instruction set level after a test."""
    before = kernels.level()
    yield
    kernels.set_level(before)


@pytest.fixture(scope="session")
def launcher() -> mpi.Launcher:
    """Return the launcher of a real mpirun. Skips the test if there is none."""
    try:
        return mpi.find_launcher(mpi.build_info(), os.environ)
    except NotBuilt as error:
        pytest.skip(f"needs an MPI: {error}")


@pytest.fixture(scope="session")
def emulated_hosts() -> None:
    """Skip the test if no cluster can be emulated."""
    try:
        mpirun()
        with Cluster(hosts=1, mbps=1000):
            pass
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.fixture
def results_of(tmp_path: Path) -> ResultsOf:
    """Return a function that reads and checks a JSON file of a benchmark in `tmp_path`, by its name."""
    return partial(results.read, tmp_path)
